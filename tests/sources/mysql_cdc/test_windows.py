"""Windows of the binary log: what is in them, in which order, again at every attempt; what is refused."""

from __future__ import annotations

from tests.sources.mysql_cdc.kit import Binlog
from tests.sources.postgres_cdc.kit import changes


def test_every_change_is_an_event_in_the_order_of_the_log_and_every_attempt_reads_the_same(orders: Binlog):
    windows = orders.windows()
    orders.execute(
        "INSERT INTO orders VALUES (1, 'one'), (2, NULL)",
        "UPDATE orders SET note = 'zwei' WHERE id = 2",
        "UPDATE orders SET id = 3 WHERE id = 2",
        "DELETE FROM orders WHERE id = 1",
    )
    window = windows.freeze()
    first, again = windows.read(window), windows.read(window)
    one, two = {"id": 1, "note": "one"}, {"id": 2, "note": None}
    assert changes(first) == [
        ("c", None, one),
        ("c", None, two),
        ("u", two, {"id": 2, "note": "zwei"}),
        ("d", {"id": 2, "note": "zwei"}, None),
        ("tombstone", {"id": 2}),
        ("c", None, {"id": 3, "note": "zwei"}),
        ("d", one, None),
        ("tombstone", {"id": 1}),
    ]
    assert changes(again) == changes(first)
    assert {record["topic"] for record in first} == {"p.shop.orders"}
    source = first[0]["value"]["source"]
    assert (source["connector"], source["db"], source["table"], source["server_id"]) == ("mariadb", "shop", "orders", 7)
    assert source["ts_ms"] == first[0]["timestamp"] and source["gtid"].startswith("0-7-")
    assert f"{source['file']}:{source['pos']}" > window.splits[0]["start"]
    windows.close(window)
    assert windows.next() == []
