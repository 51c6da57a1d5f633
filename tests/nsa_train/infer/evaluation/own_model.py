"""lm-evaluation-harness over `NSATransformer` itself: logits and greedy decoding without Transformers' classes."""

from pathlib import Path

import torch

from nsa_train.checkpoint.trained_model import open_trained_model
from nsa_train.infer.evaluation.lm_eval import NSAHarnessModel
from nsa_train.run_model import build_model


class OwnHarnessModel(NSAHarnessModel):
    """Tokenizer and bookkeeping as in the harness; every logit from our own model. One request at a time."""

    def __init__(self, pretrained: str, **options) -> None:
        super().__init__(pretrained=pretrained, batch_size=1, **options)
        trained = open_trained_model(Path(pretrained))
        self.own = build_model(trained.config, trained.vocab_size).eval()
        self.own.load_state_dict(trained.tensors)
        self._model.forward = None  # nothing below may use it

    def _model_call(self, inps, attn_mask=None, labels=None):
        with torch.no_grad():
            return self.own(inps)

    def _model_generate(self, context, max_length, stop, **options):
        assert not options.get("do_sample")
        cache = self.own.new_cache(1, max_length)
        ids, new = context, context
        with torch.no_grad():
            while ids.shape[1] < max_length:
                new = self.own(new, cache=cache)[:, -1:].argmax(-1)
                ids = torch.cat([ids, new], 1)
                if new.item() == self.eot_token_id:
                    break
        return ids
