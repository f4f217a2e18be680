"""Turns of a chat: what the memory keeps of one for the next."""

import pytest

_SYSTEM = "You answer in few words. " * 12


@pytest.mark.parametrize("thinks", [True, False])
def test_the_next_turn_reuses_all_that_it_shares(server: object, thinks: bool) -> None:
    """The prompt of a turn with thoughts ends with the token that opens them; without its thoughts the next turn parts there."""
    messages = [{"role": "system", "content": _SYSTEM + str(thinks)}, {"role": "user", "content": "What is a page?"}]
    before, answers = 0, []
    for question in ("And a block?", "And a slot?", ""):
        body = {"messages": messages, "max_tokens": 6, "temperature": 0, "enable_thinking": thinks}
        answer = server.post("/v1/chat/completions", body).json()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        if before:
            assert cached >= before - 1, answer["usage"]["memory"]["prefix_stop"]
        before = answer["usage"]["prompt_tokens"]
        answers.append((body, answer["choices"][0]["message"]))
        messages = [*messages, {"role": "assistant", "content": "A part."}, {"role": "user", "content": question or "Why?"}]
    for body, message in answers:  # a hit changes nothing
        assert server.post("/v1/chat/completions", {**body, "cache_salt": "cold"}).json()["choices"][0]["message"] == message
