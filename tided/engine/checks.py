"""What no request may be, whoever sent it: the step that carries one runs on every rank, and must not fail there.

The API refuses most of this earlier and in better words; a request that comes another way is refused here.
"""

import math
from collections.abc import Callable, Sequence

from tided.engine.scheduler import Limits
from tided.engine.types import Pixels, Request, Sampling
from tided.errors import ContextOverflowError, RequestError


def check_request(request: Request, limits: Limits, vocab_size: int) -> None:
    """Raises RequestError."""
    prompt_tokens = len(request.prompt_ids)
    if not prompt_tokens or request.max_tokens < 1:
        raise RequestError("a request needs a prompt and room for one token", param="messages")
    if prompt_tokens + request.max_tokens > limits.context_tokens:
        raise ContextOverflowError(limits.context_tokens, prompt_tokens, request.max_tokens)
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab_size:
        raise RequestError(f"the prompt holds a token id outside of 0 to {vocab_size - 1}", param="messages")
    if request.fidelity != "fast" and not limits.can_wait:
        raise RequestError(
            f"fidelity {request.fidelity} is off here: the profile has no slots for it (tide.sync_slots = 0)",
            param="fidelity",
        )
    if request.background and (request.max_tokens > 1 or not request.scored):
        raise RequestError(
            "only a prompt that is scored, without an answer, runs in the background", param="background"
        )
    if request.redrawn_from and not (request.scored and 0 < request.redrawn_from < prompt_tokens):
        raise RequestError("an answer that is drawn again ends a scored prompt", param="redrawn_from")
    if not request.adapts and (request.max_tokens > 1 or not request.scored):
        raise RequestError(
            "only a prompt that is scored, without an answer, may leave the experts alone", param="adapt"
        )
    if any(not 0 <= token_id < vocab_size for token_id in request.sampling.logit_bias):
        raise RequestError(f"a token id is not from 0 to {vocab_size - 1}", param="logit_bias")
    if request.min_tokens < 0 or (request.logprobs or 0) < 0 or request.scored_top < 0:
        raise RequestError("min_tokens and logprobs are from 0 on", param="min_tokens")
    check_sampling(request.sampling)


def check_images(request: Request, pixels: Sequence[Pixels], image_tokens: Callable[[int, int], int]) -> None:
    """Raises RequestError. `image_tokens`: of the model, for an image of so many pixels; 0: none of that size."""
    end = 0
    for image in request.images:
        fits = end <= image.first and image.end <= len(request.prompt_ids)
        if not fits or image.tokens < 1 or image.tokens != image_tokens(image.height, image.width):
            raise RequestError("an image does not fit its place in the prompt, or this model", param="messages")
        end = image.end
    sizes = [image.height * image.width * 3 for image in request.images]
    if sizes != [len(one.data) for one in pixels]:
        raise RequestError("the pixels of a request are not those of its images", param="messages")


def check_sampling(sampling: Sampling) -> None:
    """Raises RequestError for values that have no meaning; extreme ones that have are welcome."""
    for name in ("temperature", "top_p", "min_p", "top_k"):
        value = getattr(sampling, name)
        if not math.isfinite(value) or value < 0:
            raise RequestError(f"{name} = {value} is not a finite number from 0 on", param=name)
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        value = getattr(sampling, name)
        if not -2 <= value <= 2 or (name == "repetition_penalty" and value <= 0):
            raise RequestError(f"{name} = {value} is out of range", param=name)
    if not all(-100 <= value <= 100 for value in sampling.logit_bias.values()):
        raise RequestError("a bias is not from -100 to 100", param="logit_bias")
    if not -(1 << 63) <= sampling.seed < 1 << 64:
        raise RequestError("seed must fit 64 bits", param="seed")
