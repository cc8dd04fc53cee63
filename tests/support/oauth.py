"""Tokens of OAUTHBEARER without a signature, as Kafka's default validator accepts them: from a function, and from an endpoint."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BROKER = {
    "listener.name.client.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,OAUTHBEARER",
    "listener.name.client.oauthbearer.sasl.jaas.config": "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"
    ' required unsecuredLoginStringClaim_sub="broker";',
}
"""Properties of a broker that accepts such tokens beside PLAIN and SCRAM."""


def make_token(config: str) -> tuple[str, float]:
    """Return a token, and the time at which it expires, in seconds since the epoch. It is the function of an ``oauth_cb``.

    :param config: the text of ``sasl.oauthbearer.config``, here the name of the user.
    """
    now = time.time()
    parts = [{"alg": "none"}, {"sub": config, "iat": int(now) - 1, "exp": int(now) + 300}]
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
    return ".".join([*encoded, ""]), now + 300


@contextmanager
def serve_tokens() -> Iterator[str]:
    """Yield the address of an endpoint that returns a token of the user who asks, by the grant ``client_credentials``."""

    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            credentials = base64.b64decode(self.headers["Authorization"].partition(" ")[2]).decode()
            user, _, secret = credentials.partition(":")
            token = {"access_token": make_token(user)[0], "token_type": "Bearer", "expires_in": 300}
            answer = json.dumps(token if secret == "hush" else {"error": "invalid_client"}).encode()
            self.send_response(200 if secret == "hush" else 401)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/token"
        finally:
            server.shutdown()
