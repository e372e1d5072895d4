"""Parts of ``tools/plan_memory.py``: parameters, activations, the plan of every pipeline stage, and the report."""
