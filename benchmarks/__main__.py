"""``python -m benchmarks [files] [postgres] [kafka] [between_topics] [records] [shapes] [fan_out] [around] [splits] [memory]
[ui] [ledger] [small] [scale] [verification] [capture] [snapshots] [send] [lakes] [bulk] [--records N] [--rounds N]
[--windows N] [--files N]``"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "which",
        nargs="*",
        choices=[
            "files",
            "postgres",
            "kafka",
            "between_topics",
            "records",
            "shapes",
            "fan_out",
            "around",
            "splits",
            "memory",
            "ui",
            "ledger",
            "small",
            "scale",
            "verification",
            "capture",
            "snapshots",
            "send",
            "lakes",
            "bulk",
            [],
        ],
        help="default: all",
    )
    parser.add_argument("--records", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=3, help="measured turns after one to warm up; the median counts")
    parser.add_argument("--windows", type=int, default=1_000, help="of lakes: windows behind which commits are measured")
    parser.add_argument("--files", type=int, default=2_000, help="of lakes: files of one window")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="airflow-kafka-spark-bench-") as temporary:
        os.environ.setdefault("AIRFLOW_HOME", str(Path(temporary) / "airflow"))
        os.environ["AIRFLOW__CORE__UNIT_TEST_MODE"] = "True"
        from benchmarks import (
            around,
            between_topics,
            bulk,
            capture,
            fan_out,
            lakes,
            ledger,
            memory,
            records,
            scale,
            send,
            shapes,
            small,
            snapshots,
            splits,
            to_files,
            to_kafka,
            to_postgres,
            ui,
            verification,
        )
        from benchmarks.bench import stand

        known = {
            "files": to_files,
            "postgres": to_postgres,
            "kafka": to_kafka,
            "between_topics": between_topics,
            "records": records,
            "shapes": shapes,
            "fan_out": fan_out,
            "around": around,
            "splits": splits,
            "memory": memory,
        }
        # These share nothing with the others.
        alone = {
            "ui": lambda: ui.run(Path(temporary)),
            "ledger": ledger.run,
            "small": lambda: small.run(Path(temporary), options.rounds),
            "scale": lambda: scale.run(Path(temporary)),
            "verification": verification.run,
            "capture": lambda: capture.run(Path(temporary), min(options.records, 1_000_000), options.rounds),
            "snapshots": lambda: snapshots.run(options.records, options.rounds),
            "send": lambda: send.run(min(options.records, 400_000), options.rounds),
            "bulk": bulk.run,
            "lakes": lambda: lakes.run(
                Path(temporary), min(options.records, 2_000_000), min(options.rounds, 2), options.windows, options.files
            ),
        }
        chosen = options.which or [*alone, *known]
        for name in (name for name in chosen if name in alone):
            alone[name]()
        wanted = [name for name in chosen if name in known]
        if not wanted:
            return
        with stand(options.records, options.rounds, Path(temporary)) as made:
            for name in wanted:
                known[name].run(made)


if __name__ == "__main__":
    main()
