"""One rank of a group: `python -m tests.control.group_rank RANK SETTINGS_JSON MODE OUT`.

Results go to OUT as safetensors."""

import sys

import msgspec
import torch
from safetensors.torch import save_file

from tided.engine.dataplane import TorchGroup
from tided.engine.link_probe import measure
from tided.errors import TideError
from tided.settings import Settings


def awkward(rank, shape):
    """fp32 values of very different size: another order of addition gives other bits."""
    random = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=random) * 10.0 ** torch.randint(-6, 7, shape, generator=random)


def results(group):
    parts = {"small": awkward(group.rank, (1, 256)), "large": awkward(group.rank, (2000, 300))}
    parts["sliced"] = awkward(group.rank, (8, 64))[:, ::2]
    found = {f"sum_{name}": group.sum(part) for name, part in parts.items()}
    own = torch.arange(6).reshape(2, 3) + 10 * group.rank
    found |= {"concat": group.concat(own), "concat_half": group.concat(own.to(torch.bfloat16))}
    group.meet("results", 20.0, lambda: None)
    found["gathered"] = group.gather(parts["small"])
    found["bytes"] = group.concat(own.to(torch.uint8)[:, :1])
    found["part_small"] = parts["small"]
    return {name: value.contiguous() for name, value in found.items()}


def main(rank, settings, mode, out):
    torch.set_num_threads(1)
    group = TorchGroup(settings, rank)
    if mode == "results":
        found = results(group)
        found["calls"] = torch.tensor([group.calls])
        speed = measure(group, torch.device("cpu"))
        assert speed.small_s > 0
        assert speed.about()["large_sum_gb_s"] > 0
        print(speed, flush=True)
        assert group.seconds > 0
        save_file(found, out)
    elif mode == "hang":
        print("up", flush=True)
        try:
            while True:
                group.sum(torch.ones(1, 256))
        except TideError as error:
            print(f"{type(error).__name__}: {error.what}", flush=True)
    group.close()
    print("closed", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Settings), sys.argv[3], sys.argv[4])
