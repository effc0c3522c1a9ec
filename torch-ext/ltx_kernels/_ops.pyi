# The builder generates _ops.py beside the compiled extension; this is what it provides.
from typing import Any

ops: Any

def add_op_namespace_prefix(op_name: str) -> str: ...
