"""One output as it grows: token ids, log-probs and text, and where a stop string ends it."""

from lamina.engine.outputs import CompletionOutput, Logprob
from lamina.engine.text import Detokeniser, TextCodec
from lamina.engine.text_stops import StopChecker
from lamina.schedule.sampling_params import SamplingParams
from lamina.schedule.step import TokenLogprobs


def to_logprobs(item: TokenLogprobs, codec: TextCodec | None) -> dict[int, Logprob]:
    """The token itself first, then the most likely ones."""

    def text(token: int) -> str | None:
        return None if codec is None else codec.token_text(token)

    found = {item.token: Logprob(item.logprob, item.rank, text(item.token))}
    for rank, (token, value) in enumerate(zip(item.top_tokens, item.top_logprobs, strict=True), start=1):
        found.setdefault(token, Logprob(value, rank, text(token)))
    return found


class GrowingOutput:
    """The text side of one output. Without a tokenizer the text stays empty and stop strings were refused before."""

    def __init__(self, index: int, params: SamplingParams, codec: TextCodec | None) -> None:
        self.params = params
        self.codec = codec
        wants = params.logprobs is not None
        self.output = CompletionOutput(index, "", [], [] if wants else None, 0.0 if wants else None)
        self._detokeniser = None if codec is None else Detokeniser(codec, params.skip_special_tokens)
        self._stopper = StopChecker(params.stop, params.include_stop_str_in_output, params.min_tokens)

    def push(self, token: int, logprobs: TokenLogprobs | None, is_stop_token: bool) -> tuple[str, str | None]:
        """Adds a token: (text that may be shown now, the stop string that ended the output or None)."""
        self.output.token_ids.append(token)
        if logprobs is not None and self.output.logprobs is not None:
            self.output.logprobs.append(to_logprobs(logprobs, self.codec))
            assert self.output.cumulative_logprob is not None
            self.output.cumulative_logprob += logprobs.logprob
        if self._detokeniser is None or (is_stop_token and not self.params.include_stop_str_in_output):
            return "", None
        return self._show(self._detokeniser.push(token))

    def finish(self, reason: str) -> tuple[str, str | None]:
        """The rest of the text; the held-back tail may still complete a stop string."""
        self.output.finish_reason = reason
        if self._detokeniser is None or self._stopper.matched is not None:
            return "", None
        rest = self._stopper.finish(self._detokeniser.finish())
        self.output.text += rest
        return rest, self._stopper.matched

    def _show(self, text: str) -> tuple[str, str | None]:
        shown, _ = self._stopper.push(text)
        self.output.text += shown
        return shown, self._stopper.matched
