"""Answers: generation, conversations and batches."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Unpack, cast

from edgeshard.chat.parsing import AnswerParser
from edgeshard.client.arguments import (
    Message,
    Tool,
    checked,
    checked_tokens,
    conversation_of,
    generation_of,
)
from edgeshard.client.batch import BatchProgress, BatchRequest, BatchResult, Prompt, run_batch
from edgeshard.client.chat_completion import ChatBuilder, ChatCompletion
from edgeshard.client.completion import Completion, CompletionBuilder
from edgeshard.client.connection import Calls
from edgeshard.client.resuming import resumed
from edgeshard.domain.control.site import ServedModel
from edgeshard.domain.errors import DeadlineError, EdgeShardError, UnavailableError
from edgeshard.domain.requests.conversation import (
    ChatEvent,
    ChatFinished,
    ChatPrompt,
    Conversation,
    TokenizeCall,
    chat_reason,
)
from edgeshard.domain.requests.generation import (
    Finished,
    GenerateOptions,
    GenerateRequest,
    GenerationEvent,
    Started,
    Token,
)
from edgeshard.proto.v1 import inference_pb2
from edgeshard.wire.generation import (
    chat_prompt_from_wire,
    conversation_to_wire,
    tokenize_request_to_wire,
)
from edgeshard.wire.site import served_model_from_wire

_CONNECTS_S = 1.0


class InferenceCalls(Calls):
    """The calls of applications."""

    async def generate(
        self, model: str, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Stream one request: a `Started`, the `Token`s one by one, and a `Finished`.

        `model` is a deployment's name, or a model's if one deployment serves it; `prompt` is text
        or token ids. Leaving the loop, or `aclose()`, cancels the request on every node at once. A
        request that has started outlives the loss of any node and of the coordinator: it pauses,
        and continues with the next token.

        The options are in `GenerateOptions`, such as `max_new_tokens` (128), `temperature` (0,
        greedy), `stop`, a string or strings that end the text, and `timeout_s` for the whole
        request (None, no bound). `edgectl generate --help` describes them with their defaults.

        Raises InvalidArgumentError naming the option at fault, NotFoundError for an unknown model,
        and UnavailableError if a node or the coordinator is away. Raises ResourceExhaustedError
        (with `retry_after_s`) if capacity is missing, and DeadlineError after `timeout_s`.
        """
        request = GenerateRequest(
            checked("model", model, str),
            generation_of(prompt, options),
            options.get("request_id", ""),
        )
        timeout_s, began_s = options.get("timeout_s"), self._clock.now()
        calls = resumed(self._connection.generate, request, timeout_s, self._clock)
        try:
            async with aclosing(calls) as events:
                async for event in events:
                    yield event
        except (DeadlineError, UnavailableError) as error:
            # A connection takes a moment: a site that has not answered within less than that is not
            # known to be away.
            late = timeout_s is not None and self._clock.now() >= began_s + timeout_s
            if (
                timeout_s is not None
                and late
                and (isinstance(error, DeadlineError) or timeout_s < _CONNECTS_S)
            ):
                raise DeadlineError(
                    f"{self.target} did not finish within {timeout_s:g} s: allow more time, or "
                    "request fewer tokens",
                    field="timeout_s",
                ) from None
            raise

    async def complete(
        self, model: str, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Run one request to its end. Arguments and errors are as in `generate`; an error has the
        text until then."""
        wants_logprobs = options.get("logprobs", False) or options.get("top_logprobs", 0) > 0
        builder = CompletionBuilder(self._clock.now(), logprobs=wants_logprobs)
        await self._collect(self.generate(model, prompt, **options), builder)
        return builder.build()

    async def text_stream(
        self, model: str, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[str, None]:
        """The text of one request, piece by piece; arguments, errors and cancelling are as in
        `generate`."""
        async with aclosing(self.generate(model, prompt, **options)) as events:
            async for event in events:
                if isinstance(event, Token | Finished) and event.text:
                    yield event.text

    # --- conversations

    async def chat(
        self,
        model: str,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        variables: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[ChatEvent, None]:
        """Stream the answer to a conversation: a `Started`, then `ReasoningDelta`, `ContentDelta`
        and `ToolCall` as they arrive, and a `ChatFinished` with the numbers of tokens.

        `messages` and `tools` are as in OpenAI's chat completions; a text is one message of the
        user's. The model's chat template makes the prompt, at the coordinator; `variables` are
        further variables of the template, such as `{"enable_thinking": False}`. Options are as in
        `generate`. A missing option has the value that the model's generation_config.json
        recommends, if any, or else the default of `generate`. `max_new_tokens` is then all that the
        context and the deployment's limit have left.

        Raises what `generate` raises; InvalidArgumentError naming `messages[2].content`, `tools`
        and the like; FailedPreconditionError for a model without a chat template.
        """
        conversation = conversation_of(messages, tools, variables)
        generation_of((0,), options)  # so that a wrong one is named before anything is sent
        timeout_s = options.get("timeout_s")
        ends_at = None if timeout_s is None else self._clock.now() + timeout_s
        try:
            prompt = await self.render_chat(model, conversation, timeout_s)
        except (DeadlineError, UnavailableError):
            # A connection takes a moment: a site that has not answered within less than that is not
            # known to be away.
            if ends_at is None or self._clock.now() < ends_at:
                raise
            raise _late(timeout_s) from None
        generate_options = cast("GenerateOptions", {**prompt.defaults.given(), **options})
        if prompt.room and not {"max_new_tokens", "max_tokens"} & options.keys():
            generate_options["max_new_tokens"] = max(1, prompt.room)
        if ends_at is not None:
            generate_options["timeout_s"] = left_s = ends_at - self._clock.now()
            if left_s <= 0:
                raise _late(timeout_s)
        parser = AnswerParser(prompt.format, tools or ())
        async with aclosing(self.generate(model, prompt.tokens, **generate_options)) as events:
            async for event in events:
                match event:
                    case Started():
                        yield event
                    case Token():
                        for delta in parser.feed(event.text, event.token):
                            yield delta
                    case Finished():
                        for delta in (*parser.feed(event.text), *parser.finish()):
                            yield delta
                        reason = chat_reason(event.reason, parser.calls > 0)
                        yield ChatFinished(reason, event.prompt_token_count, event.new_token_count)

    async def complete_chat(
        self,
        model: str,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        variables: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> ChatCompletion:
        """The whole answer to a conversation. Arguments and errors are as in `chat`; an error has
        the text until then."""
        builder = ChatBuilder(self._clock.now())
        await self._collect(
            self.chat(model, messages, tools=tools, variables=variables, **options), builder
        )
        return builder.build(self._clock.now())

    async def _collect(
        self, events: AsyncGenerator[Any, None], builder: CompletionBuilder | ChatBuilder
    ) -> None:
        """Give all events to `builder`. An error of theirs gets the text until then."""
        try:
            async with aclosing(events):
                async for event in events:
                    builder.add(event, self._clock.now())
        except EdgeShardError as error:
            error.partial_text = builder.text
            raise

    async def batch(
        self,
        requests: Sequence[BatchRequest],
        concurrency: int = 8,
        on_progress: BatchProgress | None = None,
    ) -> list[BatchResult]:
        """Run many requests, `concurrency` of them at a time; the results are in the order of the
        requests.

        A request that fails has its EdgeShardError for a result, and the others continue. If the
        site lacks capacity for one, it is sent again, for five minutes, since it was not begun;
        others are not repeated. `on_progress` gets (done, in all) after each.
        """

        async def run(request: BatchRequest) -> Completion | ChatCompletion:
            if isinstance(request, Prompt):
                return await self.complete(request.model, request.prompt, **request.options)
            return await self.complete_chat(
                request.model,
                request.messages,
                tools=request.tools,
                variables=request.variables,
                **request.options,
            )

        return await run_batch(run, requests, concurrency, on_progress, self._clock)

    async def render_chat(
        self, model: str, conversation: Conversation, timeout_s: float | None = None
    ) -> ChatPrompt:
        """The tokens that a conversation becomes, and how to read the answer; raises as `chat`
        does."""
        checked("model", model, str)
        request = inference_pb2.RenderChatRequest(
            model=model, conversation=conversation_to_wire(conversation)
        )
        response = await self._inference("RenderChat", request, timeout_s)
        return chat_prompt_from_wire(response.prompt)

    async def tokenize(self, model: str, text: str, special: bool = True) -> tuple[int, ...]:
        """The token ids of a text, by the tokenizer of a served model; `special` adds those around
        it."""
        call = TokenizeCall(checked("model", model, str), checked("text", text, str), special)
        response = await self._inference("Tokenize", tokenize_request_to_wire(call))
        return tuple(response.tokens)

    async def detokenize(self, model: str, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens as they are written. Raises InvalidArgumentError
        naming `tokens`."""
        checked("model", model, str)
        request = inference_pb2.DetokenizeRequest(
            model=model, tokens=checked_tokens("tokens", tokens)
        )
        response = await self._inference("Detokenize", request)
        return str(response.text)

    async def cancel(self, request_id: str) -> bool:
        """Cancel a running request; False when there is none of this id."""
        request = inference_pb2.InferenceServiceCancelRequest(request_id=request_id)
        response = await self._inference("Cancel", request)
        return bool(response.cancelled)

    async def served_models(self) -> tuple[ServedModel, ...]:
        """The deployments that answer now, with their models."""
        request = inference_pb2.InferenceServiceListModelsRequest()
        response = await self._inference("ListModels", request)
        return tuple(served_model_from_wire(model) for model in response.models)


def _late(timeout_s: float | None) -> DeadlineError:
    return DeadlineError(
        f"not finished within {timeout_s:g} s; allow more time, or request fewer tokens",
        field="timeout_s",
    )
