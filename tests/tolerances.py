"""How far results may be from their reference, per dtype: one table, never loosened to pass."""

LOGITS_ATOL = {"float32": 1e-4, "bfloat16": 0.25}
"""Absolute, on logits of tiny models (standard deviation about 2) against a reference in float32."""

GELU_TABLE_ATOL = {"float32": 0.01}
"""The same against llama.cpp, which looks GELU up in a table of float16 numbers."""

PROJECTION_ATOL = {"float32": 1e-5}
"""Absolute, on one projection or one rotation of numbers of order one."""

ATTENTION_ATOL = {"float32": 2e-6, "bfloat16": 0.03}
"""Absolute, on attention over values of order one against float64."""

CODED_ATOL = {"float32": 0.001, "two bfloat16": 0.07}
"""Absolute, in steps, on KV that was coded beside its rounding, by matrices with condition numbers up to 2,400."""
