"""The tiny models in their Hugging Face form, with the byte tokenizer."""

import jax
import numpy as np
import pytest

from ca_jax.models.transformer import Transformer
from ca_jax.testing import tiny
from tests.tolerances import LOGITS_ATOL

CONFIG = tiny.tiny_config(vocab_size=260, num_kv_heads=1, head_dim=10)


def test_a_vocabulary_too_small_for_bytes_is_refused(tmp_path):
    config = tiny.tiny_config(vocab_size=100)
    with pytest.raises(ValueError, match="must be at least 256, got 100"):
        tiny.write_tiny_hf(tmp_path, config, tiny.tiny_params(config))
    assert not list(tmp_path.iterdir())


def test_transformers_loads_the_directory(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    params = tiny.tiny_params(CONFIG)
    tiny.write_tiny_hf(tmp_path, CONFIG, params)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    ours = jax.jit(Transformer(CONFIG).apply)(params, np.array([[1, 2, 3]]), np.arange(3)[None])[0]
    theirs = model(torch.tensor([[1, 2, 3]])).logits.detach().numpy()
    np.testing.assert_allclose(ours, theirs, atol=LOGITS_ATOL["float32"], rtol=0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "é"}], add_generation_prompt=True, tokenize=False
    )
    assert rendered == "<|im_start|>user\né<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(rendered, add_special_tokens=False).input_ids == tiny.byte_tokenizer().encode(rendered).ids
