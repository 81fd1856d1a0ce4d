"""Asks for one address with the library named first and prints what came."""

import sys

how, url = sys.argv[1:3]


def told(status, headers, body):
    print(status, headers.get("retry-after", ""))
    sys.stdout.write(body)
    sys.exit(0 if status == 200 else 1)


if how in ("urllib", "strict"):
    import ssl
    import urllib.error
    import urllib.request

    context = ssl.create_default_context()
    if how == "strict":
        # What Python 3.13 asks of every certificate.
        context.verify_flags |= ssl.VERIFY_X509_STRICT
    try:
        response = urllib.request.urlopen(url, context=context)
    except urllib.error.HTTPError as error:
        response = error
    told(response.status, response.headers, response.read().decode())
elif how == "requests":
    import requests

    response = requests.get(url)
    told(response.status_code, response.headers, response.text)
elif how.startswith("httpx"):
    import httpx

    with httpx.Client(http2=how.endswith("2")) as client:
        response = client.get(url)
        told(response.status_code, response.headers, response.text)
elif how == "aiohttp":
    import asyncio

    import aiohttp

    async def ask():
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return response.status, response.headers, await response.text()

    told(*asyncio.run(ask()))
