"""`AttentionHolder`: a module around an attention layer, for engines that want a class of their own."""

from torch import nn

from nsa.core.nsa_attention import NSAAttention


class AttentionHolder(nn.Module):
    """Holds a layer as `layer`. The layer's parts are registered here under their own names, so that parameters are
    called as in the layer itself and one state dict fits both; the layer is none of the modules of this one."""

    def __init__(self, layer: NSAAttention) -> None:
        super().__init__()
        self._held = (layer,)  # a tuple: nn.Module registers none of its members
        for name, part in layer.named_children():
            self.add_module(name, part)

    @property
    def layer(self) -> NSAAttention:
        return self._held[0]

    attention_layer = layer
    """For `nsa.core.model_layers`."""

    def train(self, mode: bool = True) -> "AttentionHolder":
        self.layer.training = mode
        return super().train(mode)
