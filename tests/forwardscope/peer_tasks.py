"""Six tasks with TransformerLens and with nnsight, as their documentation solves them, on a Llama of 30 layers.

    python tests/forwardscope/peer_tasks.py {transformer_lens,nnsight} DIRECTORY OUT

This is a program for an environment with the library, which does not need Forwardscope. It writes the results of all
tasks to the safetensors file OUT. `test_peer_tasks.py` has the same tasks with Forwardscope.
"""

import sys
from typing import Any

import torch
from safetensors.torch import save_file

CLEAN = [1, 9690, 198, 2683, 359, 253, 5356, 5646]
CORRUPTED = [1, 9690, 198, 2683, 700, 253, 5356, 900]
TOKEN, HEAD, WIDTH = 2683, 4, 64


class TransformerLens:
    def __init__(self, directory: str) -> None:
        from transformer_lens.model_bridge import TransformerBridge

        self.model: Any = TransformerBridge.boot_transformers(directory, device="cpu", dtype=torch.float32)

    def stages(self) -> Any:
        logits, cache = self.model.run_with_cache(torch.tensor([CLEAN]))
        return {"logits": logits, **cache}

    def ablate(self) -> Any:
        def zero(z: Any, hook: Any) -> Any:
            z[:, :, HEAD] = 0
            return z

        hooks = [("blocks.5.attn.hook_z", zero)]
        return self.model.run_with_hooks(torch.tensor([CLEAN]), fwd_hooks=hooks)[0, -1]

    def patch(self) -> Any:
        _, cache = self.model.run_with_cache(torch.tensor([CLEAN]))

        def patch(resid: Any, hook: Any) -> Any:
            resid[:, 4] = cache[hook.name][:, 4]
            return resid

        hooks = [("blocks.12.hook_resid_pre", patch)]
        return self.model.run_with_hooks(torch.tensor([CORRUPTED]), fwd_hooks=hooks)[0, -1]

    def lens(self) -> Any:
        _, cache = self.model.run_with_cache(torch.tensor([CLEAN]))
        resid = torch.stack([cache[f"blocks.{layer}.hook_resid_post"][0, -1] for layer in range(30)])
        return self.model.unembed(self.model.ln_final(resid[None]))[0, :, TOKEN]

    def gradient(self) -> Any:
        kept = []

        def keep(resid: Any, hook: Any) -> None:
            resid.retain_grad()
            kept.append(resid)

        hooks = [("blocks.12.hook_resid_post", keep)]
        self.model.run_with_hooks(torch.tensor([CLEAN]), fwd_hooks=hooks)[0, -1, TOKEN].backward()
        return kept[0].grad

    def steer(self) -> Any:
        ids = list(CLEAN)

        def add(resid: Any, hook: Any) -> Any:
            return resid + 0.5

        with self.model.hooks(fwd_hooks=[("blocks.12.hook_resid_post", add)]):
            for _ in range(6):
                ids.append(int(self.model(torch.tensor([ids]))[0, -1].argmax()))
        return torch.tensor(ids[len(CLEAN) :])


class Nnsight:
    def __init__(self, directory: str) -> None:
        import nnsight

        options = {"device_map": "cpu", "dtype": torch.float32, "dispatch": True}
        self.model: Any = nnsight.TransformersModel(directory, task="text-generation", **options)

    def ablate(self) -> Any:
        with self.model.trace(torch.tensor([CLEAN])):
            self.model.model.layers[5].self_attn.o_proj.input[:, :, HEAD * WIDTH : (HEAD + 1) * WIDTH] = 0
            logits = self.model.lm_head.output[0, -1].save()
        return logits

    def patch(self) -> Any:
        with self.model.trace(torch.tensor([CLEAN])):
            resid = self.model.model.layers[11].output.save()
        with self.model.trace(torch.tensor([CORRUPTED])):
            self.model.model.layers[11].output[:, 4] = resid[:, 4]
            logits = self.model.lm_head.output[0, -1].save()
        return logits

    def lens(self) -> Any:
        with self.model.trace(torch.tensor([CLEAN])):
            final, head = self.model.model.norm, self.model.lm_head
            found = [head(final(layer.output))[0, -1, TOKEN] for layer in self.model.model.layers]
            logits: Any = torch.stack(found)
            logits = logits.save()
        return logits

    def gradient(self) -> Any:
        with self.model.trace(torch.tensor([CLEAN])):
            resid = self.model.model.layers[12].output
            resid.requires_grad_(True)
            logit = self.model.lm_head.output[0, -1, TOKEN]
            with logit.backward():
                gradient = resid.grad.save()
        return gradient

    def steer(self) -> Any:
        ids = list(CLEAN)
        for _ in range(6):
            with self.model.trace(torch.tensor([ids])):
                self.model.model.layers[12].output += 0.5
                token = self.model.lm_head.output[0, -1].argmax().save()
            ids.append(int(token))
        return torch.tensor(ids[len(CLEAN) :])


def main(library: str, directory: str, out: str) -> None:
    tasks: Any = {"transformer_lens": TransformerLens, "nnsight": Nnsight}[library](directory)
    found: dict[str, Any] = {}
    for name in ("stages", "ablate", "patch", "lens", "gradient", "steer"):
        if hasattr(tasks, name):
            result = getattr(tasks, name)()
            results = result if isinstance(result, dict) else {name: result}
            found |= {key: x.detach().clone().contiguous() for key, x in results.items() if torch.is_tensor(x)}
    save_file(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
