"""moto's server with a cache of values that moto computes for each request: the names of its directories, the service of a host,
and the dates of objects that it has listed before. They took about a third of the CPU time of requests.
"""

from __future__ import annotations

from functools import lru_cache

from moto import backends
from moto.core import serialize
from moto.moto_server.werkzeug_app import DomainDispatcherApplication
from moto.server import main

if __name__ == "__main__":
    names = tuple(backends.list_of_moto_modules())
    backends.list_of_moto_modules = lambda: names
    DomainDispatcherApplication.get_backend_for_host = lru_cache(DomainDispatcherApplication.get_backend_for_host)
    serialize.parse_to_aware_datetime = lru_cache(10_000)(serialize.parse_to_aware_datetime)
    main()
