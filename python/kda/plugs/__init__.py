"""What :mod:`kda.fla`, :mod:`kda.sglang` and :mod:`kda.vllm` put into engines, and what these adapters share."""
