"""A transformer that is frozen after it has learned public text, LoRA adapters, and a head."""

from functools import lru_cache

import torch
from torch import nn
from torch.utils.data import DataLoader

from perdl_lora.reports import LENGTH, N_LABELS, N_WORDS, public_reports, to_tokens

torch.set_num_threads(1)
WIDTH, HEADS, LAYERS, RANK = 64, 4, 2, 4


class Block(nn.Module):
    """Self-attention and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """Return what each place of texts becomes that have words where ``words`` is true."""
        y = self.norm(x)
        parts = [layer(y).unflatten(2, (HEADS, -1)) for layer in (self.query, self.key, self.value)]
        q, k, v = (part.transpose(1, 2) for part in parts)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, words[:, None, None])
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """The base: a vector for each place of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(N_WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the vectors."""
        x = self.word(text) + self.place.weight
        for block in self.blocks:
            x = block(x, text > 0)
        return self.norm(x)


@lru_cache  # once per process
def pretrained() -> dict[str, torch.Tensor]:
    """Return the base's arrays, which learn to guess hidden words of public text for seconds.

    With a model of your own, read its file here.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base, texts = Transformer(), to_tokens(public_reports())
        optimizer = torch.optim.AdamW(base.parameters(), lr=3e-3)
        for _ in range(300):
            text = texts[torch.randint(len(texts), (64,))]
            hidden = torch.rand(text.shape) < 0.25
            scores = base(text.masked_fill(hidden, 1))[hidden] @ base.word.weight.T
            optimizer.zero_grad()
            nn.functional.cross_entropy(scores, text[hidden]).backward()
            optimizer.step()
    return base.state_dict()


class LoRA(nn.Module):
    """A frozen layer, and a change of low rank that is trained (Hu et al., ICLR 2022)."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.lora_a = nn.Linear(frozen.in_features, RANK, bias=False)
        self.lora_b = nn.Linear(RANK, frozen.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, changed."""
        return self.frozen(x) + self.lora_b(self.lora_a(x))


class Net(nn.Module):
    """The frozen base with adapters, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Transformer()
        self.base.load_state_dict(pretrained())
        self.base.requires_grad_(False)
        for block in self.base.blocks:
            for name in ("query", "value", "up", "down"):
                setattr(block, name, LoRA(getattr(block, name)))
        self.head = nn.Linear(WIDTH, N_LABELS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return a score for each label."""
        words = (text > 0)[:, :, None]
        return self.head((self.base(text) * words).sum(dim=1) / words.sum(dim=1))


def train(net: nn.Module, loader: DataLoader, epochs: int, lr: float) -> float:
    """Train what is not frozen, and return the last batch's loss."""
    parameters = [one for one in net.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    for _ in range(epochs):
        for X, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(X), y)
            loss.backward()
            optimizer.step()
    return loss.item()


def test(net: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Return the loss and the accuracy."""
    X, y = loader.dataset.tensors
    with torch.no_grad():
        scores = net(X)
    accuracy = (scores.argmax(dim=1) == y).float().mean().item()
    return nn.functional.cross_entropy(scores, y).item(), accuracy
