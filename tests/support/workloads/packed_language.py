"""A causal language model on a stream of documents, packed into blocks. No token sees another document."""

import torch
import torch.nn.functional as F
from torch import nn

BLOCK = 16  # tokens
NUM_WORDS = 11


def random_document(generator):
    """2 to 11 tokens that count upwards, such as 9 10 0 1 2."""
    length = int(torch.randint(2, 12, (), generator=generator))
    first = int(torch.randint(NUM_WORDS, (), generator=generator))
    return (first + torch.arange(length)) % NUM_WORDS


class PackedDocuments:
    """A stream of blocks of documents, one after the other. A document may go on in the next block."""

    def __init__(self, num_blocks, seed):
        self.num_blocks = num_blocks
        self.seed = seed

    def __iter__(self):
        """Yield pairs of [BLOCK + 1]: the tokens, and the number of the document that each token is from.

        The last token of a block is a target only, and comes again as the first of the next block.
        """
        generator = torch.Generator().manual_seed(self.seed)
        tokens = torch.zeros(0, dtype=torch.int64)
        documents = torch.zeros(0, dtype=torch.int64)
        num_documents = 0
        for _ in range(self.num_blocks):
            while len(tokens) < BLOCK + 1:
                document = random_document(generator)
                tokens = torch.cat([tokens, document])
                documents = torch.cat([documents, torch.full_like(document, num_documents)])
                num_documents += 1
            yield tokens[: BLOCK + 1], documents[: BLOCK + 1]
            tokens = tokens[BLOCK:]
            documents = documents[BLOCK:]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, 8)
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, NUM_WORDS)

    def forward(self, tokens, documents):
        """Logits [batch, BLOCK, words]. A token attends to earlier tokens of its own document, and to itself."""
        x = self.words(tokens)  # [batch, BLOCK, 8]
        is_same_document = documents[:, :, None] == documents[:, None, :]  # [batch, query, key]
        is_not_later = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=x.device).tril()  # [query, key]
        mask = is_same_document & is_not_later
        q, k, v = self.qkv(x).chunk(3, dim=2)
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.head(x)


def load_data(args):
    return PackedDocuments(500, seed=1), PackedDocuments(23, seed=2)


def build_model(args):
    return Model()


def build_optimizer(model, args):
    return torch.optim.AdamW(model.parameters(), args.lr / 10, eps=1e-3)


def loss_sums(model, batch, args):
    tokens, documents = batch  # [batch, BLOCK + 1] each
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]
    logits = model(inputs, documents[:, :-1])

    # The first token of a document does not count, because nothing before it could predict it.
    is_counted = documents[:, 1:] == documents[:, :-1]  # [batch, BLOCK]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    loss = (losses * is_counted.flatten()).sum()
    return {"loss": (loss, is_counted.sum())}
