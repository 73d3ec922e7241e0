"""What runs inside vLLM's workers: new weights from a slot in shared memory into the live model.

Mixed into vLLM's Worker (`worker_extension_cls`); called by `collective_rpc`, with plain values.
"""

from typing import Any

import msgspec
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform

from async_rl.protocol.weight_sync import TensorEntry
from async_rl.weights.manifest import views
from async_rl.weights.slot import Maps


class SlotReader:
    """`self` is vLLM's Worker."""

    model_runner: Any
    vllm_config: Any
    _slots: Maps | None = None

    def load_slot(self, path: str, tensors: list[dict[str, Any]]) -> int:
        """Load the tensors that lie in the slot at `path`; how many."""
        if self._slots is None:
            self._slots = Maps(writable=False)
        entries = msgspec.convert(tensors, list[TensorEntry])
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(weights_iterator=views(entries, self._slots.open(path)))
        repack_embeddings(self.model_runner.model)
        repack_experts(self.model_runner.model)
        return len(entries)


def repack_embeddings(model: torch.nn.Module) -> None:
    """On a CPU, linear layers compute on a copy that oneDNN has packed. Of a head tied to the embeddings vLLM's reload
    leaves that copy as it was, silently; it is packed again here."""
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear") and module.weight.numel():
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def repack_experts(model: torch.nn.Module) -> None:
    """On a CPU, experts compute on weights in a packed layout. Of these vLLM's reload leaves the plain ones where the
    packed ones were, silently; they are packed here, as at the first loading."""
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)
