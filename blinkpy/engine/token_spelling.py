"""The bytes that each token of a model stands for, from its tokenizer: grammars are about bytes."""

import logging
from pathlib import Path

from blinkpy.kv.token_bytes import TokenBytes

logger = logging.getLogger("blinkpy.engine")


def read_token_bytes(folder: Path, vocab_size: int) -> TokenBytes | None:
    """The bytes of a model's tokens in grammars. None, with a line in the log, where the model's folder has no tokenizer that can
    be read, or one in which a token's bytes depend on its neighbours."""
    from tokenizers import Tokenizer as Encoder

    from blinkpy.dpu.text.detokenizer import TokenTexts
    from blinkpy.dpu.text.token_pieces import token_pieces

    file = folder / "tokenizer.json"
    if not file.is_file():
        logger.warning("no grammars: %s has no %s", folder, file.name)
        return None
    try:
        encoder = Encoder.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        logger.warning("no grammars: can't read %s: %s", file, error)
        return None
    pieces = TokenTexts(encoder).pieces
    if pieces is None:
        logger.warning("no grammars: the bytes of one of the model's tokens depend on others")
        return None
    return TokenBytes.of(token_pieces(encoder, pieces), vocab_size)
