"""GET /docs: every route and field of the OpenAPI document, on a page that asks nobody else for anything."""

import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

from tests.tsched.serving.conftest import RunningServer
from tmodel.presets import PRESETS
from tsched.serving.app import create_app
from tsched.serving.docs_page import render_docs
from tsched.serving.local_client import LocalClient
from tsched.serving.protocol import chat, completions


class Page(HTMLParser):
    """The page's tags with their attributes, its text, and the tags that are not closed in turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.add(data.strip())


def test_the_page_has_every_route_and_field_and_needs_no_network(server: RunningServer) -> None:
    answer, document = server.get("/docs"), server.get("/openapi.json").json
    assert "422" not in {
        status for one in document["paths"].values() for way in one.values() for status in way["responses"]
    }
    page, text = Page(answer.body.decode()), answer.body.decode()
    assert (answer.status, page.open) == (200, [])
    assert document["paths"].keys() <= page.words
    for name in ("CompletionRequest", "ChatRequest", "SwapRequest", "Completion"):
        assert document["components"]["schemas"][name]["properties"].keys() <= page.words
    assert {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "form", "object"} == set()
    for path in ("/v1/completions", "/v1/chat/completions"):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert json.dumps(body["example"]) in html.unescape(text)
        stream = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
        assert stream["itemSchema"]["properties"]["data"]["anyOf"][0] == {"const": "[DONE]"}
        assert {"429", "503", "504"} <= document["paths"][path]["post"]["responses"].keys()
    assert server.get("/health/").status == 404, "a route has one name"
    anchors = {given["id"] for _, given in page.tags if "id" in given}
    links = {str(given["href"]) for tag, given in page.tags if tag == "a"}
    assert {link.removeprefix("#") for link in links - {"openapi.json"}} <= anchors
    assert not re.search(r"(https?:)?//", text.replace("$SERVER", ""))
    (style,) = re.findall(r"<style>(.*?)</style>", text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert answer.headers["content-security-policy"].startswith(f"default-src 'none'; style-src 'sha256-{digest}'")
    assert server.get("/redoc").status == server.get("/docs/oauth2-redirect").status == 404


def test_a_stream_is_described_as_events_of_its_chunks_and_errors(tmp_path: Path) -> None:
    app = create_app(LocalClient(tmp_path))
    paths = app.openapi()["paths"]
    for path, chunk in (("/v1/completions", "Completion"), ("/v1/chat/completions", "ChatChunk")):
        stream = paths[path]["post"]["responses"]["200"]["content"]["text/event-stream"]
        assert stream.keys() == {"itemSchema"}, stream
        events = stream["itemSchema"]
        last, json_text = events["properties"]["data"]["anyOf"]
        assert (events["type"], events["required"], last) == ("object", ["data"], {"const": "[DONE]"})
        assert (json_text["type"], json_text["contentMediaType"]) == ("string", "application/json")
        kinds = [one["$ref"].removeprefix("#/components/schemas/") for one in json_text["contentSchema"]["anyOf"]]
        assert kinds == [chunk, "ErrorBody"]
    assert not app.router.redirect_slashes, "a route has one name"


def test_the_examples_of_the_page_are_of_a_model_that_everybody_has() -> None:
    assert {completions.EXAMPLE["model"], chat.EXAMPLE["model"]} <= PRESETS.keys()


def test_the_page_of_docs_lists_every_route_and_every_metric_of_our_own(server: RunningServer) -> None:
    text = (Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
    paths = {path.replace("{model}", "{id}") for path in server.get("/openapi.json").json["paths"]}
    assert not {path for path in paths if not re.search(rf"(GET|POST) {re.escape(path)}`", text)}
    metrics = set(re.findall(r"^# TYPE (tkernels_\w+)", server.get("/metrics").body.decode(), flags=re.MULTILINE))
    metrics = {name for name in metrics if not name.endswith("_created")}
    assert len(metrics) > 8
    shown = {name.removesuffix("…") for name in re.findall(r"`(tkernels_\w+…?)", text)}
    assert not {name for name in metrics if not any(name == one or name.startswith(one) for one in shown)}


def test_a_required_field_is_told_from_one_with_a_default() -> None:
    fields = {"prompt": {}, "n": {"type": "integer", "default": 1}}
    document = {
        "info": {"title": "t", "version": "1"},
        "paths": {},
        "components": {"schemas": {"One": {"required": ["prompt"], "properties": fields}}},
    }
    rows = re.findall(r"<tr><td><code>(.*?)</code></td><td>(.*?)</td><td>(.*?)</td></tr>", render_docs(document))
    assert rows == [("prompt", "any JSON", "required"), ("n", "integer", "<code>1</code>")]


def test_what_a_document_says_is_text_on_the_page() -> None:
    wild = "<script>alert(1)</script>"
    field = {"type": "string", "default": wild}
    document = {
        "info": {"title": wild, "version": "1"},
        "paths": {f"/{wild}": {"get": {"description": wild, "responses": {"200": {"description": wild}}}}},
        "components": {"schemas": {"One": {"properties": {wild: field}}}},
    }
    assert "script" not in {tag for tag, _ in Page(render_docs(document)).tags}
