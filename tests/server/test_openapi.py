"""The OpenAPI file is true, the page shows it without a network, and nothing that it allows brings the server down."""

import importlib.util
import json
import re
from pathlib import Path

import jsonschema_rs
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import content_type_conformance, not_a_server_error, response_schema_conformance, status_code_conformance
from schemathesis.generation import GenerationMode

from lamina.base.config import EngineConfig
from lamina.engine.client import EngineClient
from lamina.server.app import ROUTES
from lamina.server.openapi import OPERATIONS, UNDESCRIBED, document, plain
from lamina.server.openapi import registered as registered_paths
from lamina.server.settings import ServerSettings
from lamina.server.state import ServerState

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
#: what a random model may say in answer to a generated case; the case itself keeps all else that was generated
MOST_TOKENS = 4
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@pytest.fixture(scope="module")
def file(server) -> dict[str, object]:
    return server.http.get("/openapi.json").json()


def test_every_endpoint_is_in_the_file() -> None:
    state = ServerState(ServerSettings(), EngineClient(EngineConfig(model="none")))
    registered = {plain(path) for path in registered_paths([one for routes in ROUTES for one in routes(state)])}
    described = {one.path for one in OPERATIONS}
    assert {"/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"} <= registered
    missing = {path for path in registered - described if not path.startswith(UNDESCRIBED)}
    assert not missing, f"not in lamina/server/openapi.py: {sorted(missing)}"


def test_the_file_is_sound(file: dict[str, object]) -> None:
    assert file["openapi"] == "3.1.0"
    text = json.dumps(file)
    for name in set(re.findall(r'"\$ref": "#/components/schemas/([^"]+)"', text)):
        assert name in file["components"]["schemas"], name
    ids = [one["operationId"] for path in file["paths"].values() for one in path.values()]
    assert len(ids) == len(set(ids))
    schemathesis.openapi.from_dict(file).validate()
    create = file["paths"]["/v1/responses"]["post"]
    assert set(create["responses"]) >= {"200", "400", "401", "404", "413", "429", "503"}
    assert "text/event-stream" in create["responses"]["200"]["content"]
    body = file["components"]["schemas"]["ResponsesRequest"]["properties"]
    assert body["model"]["anyOf"][0] == {"enum": ["tiny"]}
    assert body["top_logprobs"]["anyOf"][0]["maximum"] == 20


def test_keys_are_in_the_file_where_they_are_needed() -> None:
    paths = ["/v1/models"]
    assert document(ServerSettings(), paths)["security"] == []
    assert document(ServerSettings(api_keys=("a-secret-key",)), paths)["security"] == [{"bearer": []}, {"x_api_key": []}]
    assert "a-secret-key" not in json.dumps(document(ServerSettings(api_keys=("a-secret-key",)), paths))


def test_the_page_needs_no_network(server) -> None:
    page = server.http.get("/docs")
    assert page.status_code == 200 and "default-src 'self'" in page.headers["Content-Security-Policy"]
    for name in re.findall(r'(?:src|href)="([^"]+)"', page.text):
        assert not name.startswith(("http", "//"))
        if not name.startswith("data:"):
            part = server.http.get(f"/{name}")
            assert part.status_code == 200 and part.content, name
    assert server.http.get("/docs/setup.py").status_code == 404
    assert server.http.get("/docs/%2e%2e%2f__init__.py").status_code == 404


def test_a_browser_shows_the_page(server, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("lamina_tests_chrome_docs", Path(__file__).parent / "chrome.py")
    assert spec is not None and spec.loader is not None
    chrome = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chrome)
    program = chrome.find()
    if program is None:
        pytest.skip("no Chromium here")
    with chrome.Chrome(program, tmp_path) as page:
        page.open(f"{server.url}/docs")
        page.wait("document.querySelectorAll('[data-path=\"/v1/messages\"]').length == 1")
        assert not page.errors
        assert all(address.startswith((server.url, "data:", "about:")) for address in page.requests), page.requests


@pytest.mark.parametrize(
    ("path", "extra"),
    [
        ("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}, "logprobs": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 4, "reasoning": {"summary": "auto"}}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "thinking": {"type": "adaptive"}}),
    ],
)
def test_the_events_of_a_stream_are_in_the_file(server, file, path: str, extra: dict[str, object]) -> None:
    # tokens that come together are one event, so more of them than events are needed
    text = server.post(path, {"max_tokens": 24, "stream": True, "seed": 3} | extra).text
    event = file["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
    described = event["properties"]["data"]
    ends_with_done = "else" in described
    kinds = described.get("else", described)["contentSchema"] | {"components": file["components"]}
    blocks = [block.split("\n")[-1].removeprefix("data: ") for block in text.strip().split("\n\n")]
    assert len(blocks) > 4 and blocks.count("[DONE]") == ends_with_done
    validator = jsonschema_rs.validator_for(kinds)
    for block in blocks[: len(blocks) - ends_with_done]:
        validator.validate(json.loads(block))


# Generated requests --------------------------------------------------------------------------------------------------

GENERATED = [one for one in OPERATIONS if one.path not in ("/ui", "/docs", "/openapi.json")]


@pytest.fixture(scope="module")
def generated(file: dict[str, object]) -> dict[tuple[str, str], schemathesis.APIOperation]:
    found = [result.ok() for result in schemathesis.openapi.from_dict(file).get_all_operations()]
    return {(one.method.lower(), one.path): one for one in found}


def shorten(body: object) -> None:
    """Answers of a few tokens; everything else stays as it was generated."""
    if not isinstance(body, dict):
        return
    names = [name for name in LENGTHS if name in body] or (
        ["max_tokens"] if "messages" in body or body.get("prompt") is not None else []
    )
    names = names or ["max_output_tokens"]
    for name in names:
        wanted = body.get(name)
        if wanted is None or (isinstance(wanted, int) and wanted > MOST_TOKENS):
            body[name] = MOST_TOKENS
    if isinstance(body.get("n"), int) and body["n"] > 4:
        body["n"] = 4


def try_cases(operation: schemathesis.APIOperation, mode: GenerationMode, most: int, url: str, is_repeatable: bool) -> None:
    """Sends generated requests; fails on a 500 and on any answer that the file does not describe."""
    session = requests.Session()
    session.trust_env = False

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=most, deadline=None, database=None, derandomize=is_repeatable, suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
    )  # fmt: skip
    def one(case: schemathesis.Case) -> None:
        if mode is GenerationMode.POSITIVE:
            shorten(case.body)
        response = case.call(base_url=url, session=session, timeout=60)
        case.validate_response(response, checks=CHECKS)

    with session:
        one()


@pytest.mark.parametrize("operation", GENERATED, ids=lambda one: f"{one.method} {one.path}")
def test_generated_requests(server, generated, operation) -> None:
    found = generated.get((operation.method, operation.path))
    if found is None:
        pytest.skip("not registered here")
    has_input = operation.body is not None or bool(operation.query) or "{" in operation.path
    is_twin = operation.path.endswith("_tokens")  # takes what another endpoint takes
    most = (3 if is_twin else 10) if operation.body else 2 if has_input else 1
    try_cases(found, GenerationMode.POSITIVE, most, server.url, is_repeatable=True)
    if operation.body is not None:
        try_cases(found, GenerationMode.NEGATIVE, 2 if is_twin else 6, server.url, is_repeatable=True)
    assert server.http.get("/ready").status_code == 200


@pytest.mark.long
@pytest.mark.parametrize("operation", [one for one in GENERATED if one.body], ids=lambda one: f"{one.method} {one.path}")
def test_many_generated_requests(server, generated, operation) -> None:
    found = generated.get((operation.method, operation.path))
    if found is None:
        pytest.skip("not registered here")
    try_cases(found, GenerationMode.POSITIVE, 150, server.url, is_repeatable=False)
    try_cases(found, GenerationMode.NEGATIVE, 75, server.url, is_repeatable=False)
    assert server.http.get("/ready").status_code == 200
