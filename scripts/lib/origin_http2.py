"""The origin that speaks HTTP/2, as an ASGI application; scripts/clients serves it with hypercorn."""

import asyncio
import hashlib
import json
import urllib.parse

PATTERN = bytes(range(256)) * 256


async def application(scope, receive, send):
    if scope["type"] != "http":
        return
    digest, size, more = hashlib.sha256(), 0, True
    while more:
        event = await receive()
        if event["type"] != "http.request":
            return
        body = event.get("body", b"")
        digest.update(body)
        size += len(body)
        more = event.get("more_body", False)
    path = scope["path"]
    query = dict(urllib.parse.parse_qsl(scope["query_string"].decode()))

    async def begin(status=200, *headers):
        await send(
            {"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain"), *headers]}
        )

    async def body(data, more=False):
        await send({"type": "http.response.body", "body": data, "more_body": more})

    if path == "/echo":
        await begin()
        headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in scope["headers"]]
        await body(
            json.dumps(
                {
                    "version": scope["http_version"],
                    "method": scope["method"],
                    "size": size,
                    "sha256": digest.hexdigest(),
                    "headers": headers,
                }
            ).encode()
        )
    elif path == "/big":
        left = int(query["size"])
        await begin(200, (b"content-length", str(left).encode()))
        while left:
            piece = PATTERN[:left]
            left -= len(piece)
            await body(piece, True)
        await body(b"")
    elif path == "/events":
        await begin()
        for number in range(4):
            await body(f"data: {number}\n\n".encode(), True)
            await asyncio.sleep(0.4)
        await body(b"")
    elif path == "/hello":
        await begin()
        await body(f"hello from the origin\nover HTTP/{scope['http_version']}\n".encode())
    else:
        await begin(404)
        await body(b"not here\n")
