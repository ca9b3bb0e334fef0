"""A real S3 server (moto) in a process of its own, behind a proxy that injects faults."""

import asyncio
import contextlib
import shutil
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from dispfl.peer.local_federation import LOOPBACK, free_ports

BUCKET = "hearts"
_START_SECONDS = 60.0


@contextlib.contextmanager
def moto_server(
    folder: Path, certificate: Path | None = None, authority: Path | None = None
) -> Iterator[str]:
    """Start a server with an empty bucket; yield its address.

    With a certificate, a file that has its key, too, it speaks HTTPS.
    """
    program = shutil.which("moto_server")
    if program is None:
        pytest.skip(
            "there is no moto_server (an environment of its own: pip install moto[s3,server])"
        )
    [port] = free_ports(1)
    endpoint = f"http://{LOOPBACK}:{port}"
    command = [program, "-p", str(port)]
    tls = None
    if certificate is not None:
        endpoint = f"https://{LOOPBACK}:{port}"
        command += ["-c", str(certificate), "-k", str(certificate)]
        tls = ssl.create_default_context(cafile=authority)
    with (folder / "moto.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                request = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
                urllib.request.urlopen(request, timeout=5, context=tls).close()
                break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None, (folder / "moto.log").read_text()
                assert time.monotonic() < deadline, "moto_server does not start"
                time.sleep(0.1)
        yield endpoint
    finally:
        process.kill()
        process.wait()


class FaultyProxy:
    """Passes requests on to a server, or does what `faults` says with the next ones of a method."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.faults: list[tuple[str, str]] = []
        """Method and fault: "503", "slow", "partial" or "denied"; one for each request."""
        self.requests: list[str] = []
        """`GET /hearts/alice/head 304`, for each request that was passed on."""
        self.endpoint = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["FaultyProxy"]:
        """Listen on loopback."""
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        [port] = free_ports(1)
        await web.TCPSite(runner, LOOPBACK, port).start()
        self.endpoint = f"http://{LOOPBACK}:{port}"
        try:
            async with aiohttp.ClientSession(auto_decompress=False) as self._session:
                yield self
        finally:
            await runner.cleanup()

    def _next_fault(self, method: str) -> str | None:
        for fault in self.faults:
            if fault[0] == method:
                self.faults.remove(fault)
                return fault[1]
        return None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        fault = self._next_fault(request.method)
        if fault == "503":
            return web.Response(status=503, text="<Error><Code>SlowDown</Code></Error>")
        if fault == "denied":
            return web.Response(status=403, text="<Error><Code>AccessDenied</Code></Error>")
        if fault == "slow":
            await asyncio.sleep(30)
        body = await request.read()
        url = self.target + request.raw_path
        async with self._session.request(
            request.method, url, data=body, headers=request.headers
        ) as answer:
            content = await answer.read()
            self.requests.append(f"{request.method} {request.path} {answer.status}")
            skipped = ("Transfer-Encoding", "Content-Encoding", "Connection")
            headers = {name: v for name, v in answer.headers.items() if name not in skipped}
            if fault == "partial" and answer.status == 200:
                response = web.StreamResponse(status=200, headers=headers)
                await response.prepare(request)
                await response.write(content[: len(content) // 2])
                assert request.transport is not None
                request.transport.abort()
                return response
            return web.Response(status=answer.status, body=content, headers=headers)
