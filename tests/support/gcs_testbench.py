"""A server of Google Cloud Storage: Google's testbench of its clients, and what it lacks of the XML API that the client of
``FilesSink`` speaks.

It runs in a Python that can import the testbench and flask: `python gcs_testbench.py <port>`. Objects, their generations and the
conditions of writes are the testbench's. Listings, removals and headers of answers come from its JSON API; an upload in parts is
one write, once it is complete.
"""

from __future__ import annotations

import itertools
import json
import sys
import urllib.parse
from collections.abc import Iterable
from typing import Any
from xml.sax.saxutils import escape

from testbench import rest_server
from werkzeug.serving import run_simple
from werkzeug.test import Client, EnvironBuilder
from werkzeug.wrappers import Request, Response

PAGE = 50
"""Objects of one page of a listing. Google's have 1,000."""


class Server:
    """The application of WSGI."""

    def __init__(self) -> None:
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.numbers = itertools.count(1)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        request = Request(environ)
        parts = request.path.strip("/").partition("/")
        answer = self._answer(request, parts[0], parts[2]) if not request.path.startswith("/storage/") else None
        return (answer or rest_server.server)(environ, start_response)

    def _answer(self, request: Request, bucket: str, name: str) -> Response | None:
        asked = request.args
        if not name and request.method == "GET" and bucket:
            return self._list(bucket, asked)
        if request.method == "DELETE":
            if upload := asked.get("uploadId"):
                self.uploads.pop(upload, None)
                return Response(status=204)
            return _send("DELETE", _metadata_path(bucket, name))
        if request.method == "POST" and "uploads" in asked:
            upload = f"upload-{next(self.numbers)}"
            self.uploads[upload] = {}
            found = f"<Bucket>{bucket}</Bucket><Key>{escape(name)}</Key><UploadId>{upload}</UploadId>"
            return _xml(f"<InitiateMultipartUploadResult>{found}</InitiateMultipartUploadResult>")
        if upload := asked.get("uploadId"):
            if upload not in self.uploads:
                return Response(status=404)
            if request.method == "PUT":
                self.uploads[upload][int(asked["partNumber"])] = request.get_data()
                return Response(headers={"ETag": f'"{asked["partNumber"]}"'})
            parts = self.uploads.pop(upload)
            content = b"".join(parts[number] for number in sorted(parts))
            self._write(bucket, name, content, {})
            found = f"<ETag>{_read_metadata(bucket, name)['etag']}</ETag>"
            return _xml(f"<CompleteMultipartUploadResult>{found}</CompleteMultipartUploadResult>")
        if request.method == "PUT":
            conditions = {key: value for key, value in request.headers.items() if key.lower().startswith("x-goog-if")}
            return self._write(bucket, name, request.get_data(), conditions)
        # The answer to HEAD has the headers of the one to GET, the length included.
        answer = _send("GET", f"/{bucket}/{urllib.parse.quote(name)}", headers=dict(request.headers))
        return _with_headers(answer, bucket, name) if answer.status_code < 300 else answer

    def _write(self, bucket: str, name: str, content: bytes, headers: dict[str, str]) -> Response:
        answer = _send("PUT", f"/{bucket}/{urllib.parse.quote(name)}", data=content, headers=headers)
        return _with_headers(answer, bucket, name) if answer.status_code < 300 else answer

    def _list(self, bucket: str, asked: Any) -> Response:
        wanted = {name: asked[name] for name in ("prefix", "delimiter") if asked.get(name)}
        found = json.loads(_send("GET", f"/storage/v1/b/{bucket}/o?{urllib.parse.urlencode(wanted)}").data)
        if "error" in found:
            return Response(json.dumps(found), status=found["error"]["code"])
        after = asked.get("continuation-token") or asked.get("start-after") or asked.get("marker") or ""
        lines = [
            (item["name"], f"<Contents><Key>{escape(item['name'])}</Key><LastModified>{item['updated']}</LastModified>"
             f"<ETag>{item['etag']}</ETag><Size>{item['size']}</Size></Contents>")
            for item in found.get("items", ())
        ]  # fmt: skip
        groups = [
            (prefix, f"<CommonPrefixes><Prefix>{escape(prefix)}</Prefix></CommonPrefixes>")
            for prefix in found.get("prefixes", ())
        ]
        size = min(int(asked.get("max-keys") or PAGE), PAGE)
        rest = [entry for entry in sorted([*lines, *groups]) if entry[0] > after]
        page = rest[:size]
        more = f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>" if len(rest) > size else ""
        return _xml(f"<ListBucketResult>{''.join(text for _, text in page)}{more}</ListBucketResult>")


def _send(method: str, path: str, **options: Any) -> Response:
    builder = EnvironBuilder.from_environ(EnvironBuilder(path, method=method, **options).get_environ())
    answer = Client(rest_server.server, Response).open(builder)
    return Response(answer.get_data(), answer.status_code, answer.headers)


def _metadata_path(bucket: str, name: str) -> str:
    return f"/storage/v1/b/{bucket}/o/{urllib.parse.quote(name, safe='')}"


def _read_metadata(bucket: str, name: str) -> Any:
    return json.loads(_send("GET", _metadata_path(bucket, name)).data)


def _with_headers(answer: Response, bucket: str, name: str) -> Response:
    """Return an answer with the headers of an object that Google's servers send, and the testbench does not."""
    from datetime import datetime
    from email.utils import format_datetime

    found = _read_metadata(bucket, name)
    if "error" in found:  # removed meanwhile
        return answer
    answer.headers["ETag"] = f'"{found["etag"]}"'
    answer.headers["x-goog-generation"] = found["generation"]
    updated = datetime.fromisoformat(found["updated"].replace("Z", "+00:00"))
    answer.headers["Last-Modified"] = format_datetime(updated, usegmt=True)
    return answer


def _xml(text: str) -> Response:
    return Response(f'<?xml version="1.0" encoding="UTF-8"?>{text}', mimetype="application/xml")


if __name__ == "__main__":
    run_simple("127.0.0.1", int(sys.argv[1]), Server(), threaded=True)
