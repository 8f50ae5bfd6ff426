"""A Google Cloud Storage of our own, for tests: what TensorStore and gcsfs ask of its JSON interface, in a thread.

`etils.epath`, by which Orbax lists and names folders, asks fsspec for a file system of the same objects. Installed, that
would be gcsfs: with `STORAGE_EMULATOR_HOST` it talks to the server, and the tests pass as well.
"""

import collections
import contextlib
import io
import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import fsspec

BUCKET = "bucket"


class Files(fsspec.AbstractFileSystem):
    """The objects as files. There are no folders: one is there as long as something is in it."""

    protocol = ("gs", "gcs")
    cachable = False
    objects: dict[str, bytes]

    def ls(self, path: str, detail: bool = True, **more: Any) -> list[Any]:
        path = str(self._strip_protocol(path))
        names = [f"{BUCKET}/{one}" for one in list(self.objects)]
        if path in names:
            found = {path: "file"}
        else:
            inside = [one.removeprefix(f"{path}/").split("/") for one in names if one.startswith(f"{path}/")]
            found = {f"{path}/{first}": "directory" if rest else "file" for first, *rest in inside}
        if not found:
            raise FileNotFoundError(path)
        sizes = {name: len(self.objects.get(name.removeprefix(f"{BUCKET}/"), b"")) for name in found}
        return [{"name": n, "type": t, "size": sizes[n], "mtime": 0} for n, t in found.items()] if detail else [*found]

    def _open(self, path: str, mode: str = "rb", **more: Any) -> io.BytesIO:
        objects, name = self.objects, str(self._strip_protocol(path)).removeprefix(f"{BUCKET}/")

        class Written(io.BytesIO):
            def close(self) -> None:
                if not self.closed:
                    objects[name] = self.getvalue()
                super().close()

        if mode == "wb":
            return Written()
        if name not in objects:
            raise FileNotFoundError(path)
        return io.BytesIO(objects[name])

    def _rm(self, path: str) -> None:
        self.objects.pop(str(self._strip_protocol(path)).removeprefix(f"{BUCKET}/"), None)

    def mkdir(self, path: str, create_parents: bool = True, **more: Any) -> None:
        pass

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def rmdir(self, path: str) -> None:
        pass


class Server(ThreadingHTTPServer):
    """The objects of a bucket, by name."""

    def __init__(self) -> None:
        super().__init__(("localhost", 0), Handler)
        self.objects: dict[str, bytes] = {}
        self.written: dict[str, int] = collections.defaultdict(int)  # how often, which requests make a condition
        self.lock = Lock()

    def about(self, name: str) -> dict[str, str]:
        return {"name": name, "generation": str(self.written[name]), "size": str(len(self.objects[name]))}


class Handler(BaseHTTPRequestHandler):
    """Answers a request."""

    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def asked(self) -> tuple[str, str, dict[str, str], bytes]:
        """The bucket, the object, the options and the content of a request."""
        url = urlsplit(self.path)
        found = re.fullmatch(r"(?:/upload|/download)?/storage/v1/b/([^/]+)(?:/o(?:/(.*))?)?", url.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        options = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        return (found[1], unquote(found[2] or ""), options, body) if found else ("", "", {}, b"")

    def answer(self, code: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        with contextlib.suppress(BrokenPipeError):  # who asked does not wait for more than the code
            self.end_headers()
            self.wfile.write(content)

    def told(self, value: Any) -> None:
        self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def do_GET(self) -> None:
        _, name, options, _ = self.asked()
        if not name:
            first, last, prefix = (
                options.get("startOffset", ""),
                options.get("endOffset"),
                options.get("prefix", ""),
            )
            found = [one for one in sorted(self.server.objects) if one.startswith(prefix) and one >= first]
            found = [one for one in found if last is None or one < last]
            ends = {one: one.find(options.get("delimiter") or "\0", len(prefix)) for one in found}
            folders = sorted({one[: end + 1] for one, end in ends.items() if end >= 0})
            self.told({"items": [self.server.about(one) for one, end in ends.items() if end < 0], "prefixes": folders})
        elif name not in self.server.objects:
            self.answer(404)
        elif options.get("alt") == "media":
            whole = self.server.objects[name]
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            first, last = (int(asked[1]), int(asked[2] or len(whole))) if asked else (0, len(whole))
            told = {"Content-Range": f"bytes {first}-{min(last, len(whole) - 1)}/{len(whole)}"} if asked else {}
            self.answer(
                206 if asked else 200, whole[first : last + 1], x_goog_generation=str(self.server.written[name]), **told
            )
        else:
            self.told(self.server.about(name))

    def do_POST(self) -> None:
        bucket, _, options, body = self.asked()
        if not bucket:  # several deletions in one request
            gone = re.findall(rb"DELETE \S*/o/(\S+) HTTP", body)
            part = "--x\r\nContent-Type: application/http\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n"
            for one in gone:
                self.server.objects.pop(unquote(one.decode()), None)
            self.answer(200, f"{part * len(gone)}--x--".encode(), Content_Type="multipart/mixed; boundary=x")
            return
        if options.get("uploadType") == "resumable":
            name = json.loads(body)["name"]
            self.answer(
                200, Location=f"http://{self.headers['Host']}/upload/storage/v1/b/{bucket}/o?name={quote(name)}"
            )
            return
        if options.get("uploadType") == "multipart":
            edge = b"--" + re.findall(r"boundary=\W*(\w+)", self.headers["Content-Type"])[0].encode()
            told, content = (one.partition(b"\n\n")[2] for one in body.replace(b"\r\n", b"\n", 8).split(edge)[1:3])
            options["name"], body = json.loads(told)["name"], content.removesuffix(b"\n")
        name = options["name"]
        with self.server.lock:
            now = self.server.written[name] if name in self.server.objects else 0
            if int(options.get("ifGenerationMatch", now)) != now:
                self.answer(412)
                return
            self.server.objects[name] = body
            self.server.written[name] += 1
            self.told(self.server.about(name))

    do_PUT = do_POST

    def do_DELETE(self) -> None:
        _, name, _, _ = self.asked()
        self.answer(204 if self.server.objects.pop(name, None) is not None else 404)


@contextlib.contextmanager
def serving() -> Iterator[tuple[str, dict[str, bytes]]]:
    """Its address, and the objects that it holds, by name."""
    with Server() as server:
        Files.objects = server.objects
        for name in Files.protocol:
            fsspec.register_implementation(name, Files, clobber=True)
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://localhost:{server.server_port}", server.objects
        finally:
            server.shutdown()
