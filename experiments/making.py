"""What recipes are made of, kept in the cache: fine-tunes of A, and alignments of A and B."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from experiments.pairs.clips import MODELS, Saved
from experiments.pairs.data import say
from experiments.pairs.training import kept, key
from experiments.questions import Read, frozen
from experiments.settings import ImageTask, Scale, Task, TextTask, follow
from transfusion import Resources, align
from transfusion.alignment.alignment import Alignment
from transfusion.evaluation.evaluator import Evaluator
from transfusion.files.publishing import publish_file
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel

HEAD = "head.safetensors"
CONFIG = "open_clip_config.json"


@dataclass(frozen=True)
class Maker:
    """A scale, a seed and a device: everything that is trained comes from here."""

    scale: Scale
    seed: int = 0
    device: str = "cpu"
    batch: int | None = None
    """Examples that are measured at a time; none for the usual."""

    def base(self, which: str) -> Path:
        """The folder of A or B."""
        return self.scale.bases.folder(which, self.seed)

    def image_tuned(self, task: ImageTask) -> Path:
        """A's fine-tune: its image tower learns, under the head that its captions make, which stays."""
        return kept(self._key(task), lambda: self._image_tuned(task), MODELS)

    def text_tuned(self, task: TextTask) -> Path:
        """A's fine-tune: its text tower learns, together with a linear head that is kept beside it."""
        return kept(self._key(task), lambda: self._text_tuned(task), MODELS)

    def head(self, task: TextTask) -> nn.Linear:
        """The head of a text task's fine-tune."""
        tensors = load_file(self.text_tuned(task) / HEAD)
        classes, width = tensors["weight"].shape
        head = nn.Linear(width, classes)
        head.load_state_dict(tensors)
        return head.requires_grad_(False)

    def aligned(self, method: str) -> Alignment:
        """π from A to B."""
        folders = [self.base(which) for which in "ab"]
        name = key(f"pi-{method}", {"bases": [folder.name for folder in folders], "method": method})
        place = MODELS / f"{name}.safetensors"
        if not place.exists():
            say(f"aligning by {method} …")
            align(*folders, method=method, resources=Resources(device=self.device)).save(place, force=True)
        return Alignment.load(place)

    def live(self, folder: Path) -> tuple[Model, LiveModel]:
        """A model to run, on the device."""
        model = Model.open(folder)
        live = LiveModel.of(model, torch.float32)
        live.module.to(self.device)
        return model, live

    def _key(self, task: Task) -> str:
        made_by = task.key | {"base": self.base("a").name, "seed": self.seed}
        return key(f"tuned-{task.name.replace(' ', '-')}-seed-{self.seed}", made_by)

    def _image_tuned(self, task: ImageTask) -> _Tuned:
        model, live = self.live(self.base("a"))
        evaluator = frozen(task.train().evaluator(model, live, batch=task.schedule.batch))
        live.module.requires_grad_(False)
        live.module.get_submodule("visual").requires_grad_(True)
        self._follow(task, evaluator, [p for p in live.module.parameters() if p.requires_grad])
        return _Tuned(live.module, self.base("a"))

    def _text_tuned(self, task: TextTask) -> _Tuned:
        torch.manual_seed(self.seed)
        model, live = self.live(self.base("a"))
        config = json.loads((self.base("a") / CONFIG).read_text())
        head = nn.Linear(config["model_cfg"]["embed_dim"], task.classes)
        evaluator = Read(task.train(), linear=head).evaluator(model, live, batch=task.schedule.batch)
        live.module.requires_grad_(True)
        live.module.get_submodule("visual").requires_grad_(False)
        live.module.get_parameter("logit_scale").requires_grad_(False)
        trained = [p for p in (*live.module.parameters(), *head.parameters()) if p.requires_grad]
        self._follow(task, evaluator, trained)
        return _Tuned(live.module, self.base("a"), head)

    def _follow(self, task: Task, evaluator: Evaluator, trained: list[nn.Parameter]) -> None:
        batch = task.schedule.batch

        def loss(generator: torch.Generator) -> Tensor:
            some = torch.randint(len(evaluator), (batch,), generator=generator).tolist()
            return next(iter(evaluator.chosen(some).losses()))

        name = f"A on {task.name}, seed {self.seed}"
        follow(trained, loss, task.schedule, seed=1000 + self.seed, name=name)


@dataclass(frozen=True)
class _Tuned:
    """A fine-tune in memory, saved like its base, with its head beside it."""

    module: nn.Module
    base: Path
    head: nn.Linear | None = None

    def save_pretrained(self, folder: str) -> None:
        config = json.loads((self.base / CONFIG).read_text())
        Saved(self.module.eval().cpu(), config).save_pretrained(folder)
        if self.head is not None:
            tensors = {name: tensor.cpu() for name, tensor in self.head.state_dict().items()}
            publish_file(Path(folder) / HEAD, lambda staged: save_file(tensors, staged), force=True)
