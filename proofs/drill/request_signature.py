"""Verifies the AWS Signature Version 4 of requests to the drill's object store.

The hash of the body is taken from its header, which is signed; the body itself is not compared with it.
"""

import hashlib
import hmac
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

_ALGORITHM = "AWS4-HMAC-SHA256"
_AUTHORIZATION = re.compile(
    rf"{_ALGORITHM} Credential=[^/,]+/(?P<scope>[^,\s]+),\s*SignedHeaders=(?P<headers>[^,\s]+),"
    r"\s*Signature=(?P<signature>[0-9a-f]{64})"
)


def is_signed_with(secret: str, method: str, target: str, headers: Mapping[str, str]) -> bool:
    """Whether a request was signed with this secret. target: path and query as sent; header names in any case."""
    sent = {name.lower(): " ".join(value.split()) for name, value in headers.items()}
    authorization = _AUTHORIZATION.fullmatch(sent.get("authorization", ""))
    if authorization is None:
        return False
    scope = authorization["scope"]
    request = _canonical_request(method, target, sent, authorization["headers"])
    hashed = hashlib.sha256(request.encode()).hexdigest()
    text = "\n".join([_ALGORITHM, sent.get("x-amz-date", ""), scope, hashed])
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = _hmac(key, part)
    return hmac.compare_digest(_hmac(key, text).hex(), authorization["signature"])


def _canonical_request(method: str, target: str, headers: Mapping[str, str], signed: str) -> str:
    address = urlsplit(target)
    query = "&".join(sorted(address.query.split("&")))
    lines = [f"{name}:{headers.get(name, '')}\n" for name in signed.split(";")]
    return "\n".join([method, address.path, query, "".join(lines), signed, headers.get("x-amz-content-sha256", "")])


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()
