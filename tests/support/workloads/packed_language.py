"""A causal language model on a stream of documents, packed into blocks. No token sees another document."""

import torch
import torch.nn.functional as F
from torch import nn

BLOCK = 16  # tokens
WORDS = 11


class Packed:
    """Blocks of tokens and of the number of the document that each is from; documents are cut at the end of a block."""

    def __init__(self, num_blocks, seed):
        self.num_blocks = num_blocks
        self.seed = seed

    def documents(self):
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            length = int(torch.randint(2, 12, (), generator=generator))
            first = int(torch.randint(WORDS, (), generator=generator))
            yield (first + torch.arange(length)) % WORDS

    def __iter__(self):
        tokens = torch.zeros(0, dtype=torch.int64)
        numbers = torch.zeros(0, dtype=torch.int64)
        num_yielded = 0
        for number, document in enumerate(self.documents()):
            tokens = torch.cat([tokens, document])
            numbers = torch.cat([numbers, torch.full_like(document, number)])
            while len(tokens) > BLOCK:
                if num_yielded == self.num_blocks:
                    return
                yield tokens[: BLOCK + 1], numbers[: BLOCK + 1]
                num_yielded += 1
                tokens = tokens[BLOCK:]
                numbers = numbers[BLOCK:]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, WORDS)

    def forward(self, tokens, numbers):
        x = self.words(tokens)
        same_document = numbers[:, :, None] == numbers[:, None, :]
        mask = same_document & torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=x.device).tril()
        q, k, v = self.qkv(x).chunk(3, dim=2)
        return self.head(x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def load_data(args):
    return Packed(500, seed=1), Packed(23, seed=2)


def build_model(args):
    return Model()


def build_optimizer(model, args):
    return torch.optim.AdamW(model.parameters(), args.lr / 10, eps=1e-3)


def loss_sums(model, batch, args):
    tokens, numbers = batch
    logits = model(tokens[:, :-1], numbers[:, :-1])
    counts = numbers[:, 1:] == numbers[:, :-1]  # the first token of a document cannot be foretold
    losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return {"loss": ((losses * counts.flatten()).sum(), counts.sum())}
