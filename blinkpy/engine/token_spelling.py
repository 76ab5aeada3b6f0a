"""The bytes that each token of a model stands for, from its tokenizer: grammars are about bytes."""

import logging
from pathlib import Path

from blinkpy.config import ConfigError
from blinkpy.kv.grammars import TokenBytes

logger = logging.getLogger("blinkpy.engine")


def read_token_bytes(folder: Path, vocab_size: int) -> TokenBytes | None:
    """The bytes of a model's tokens in grammars. None, with a line in the log, where the model's folder has no tokenizer that can
    be read, or one in which a token's bytes depend on its neighbours."""
    from blinkpy.dpu.text.detokenizer import TokenTexts
    from blinkpy.dpu.text.token_pieces import token_pieces
    from blinkpy.dpu.text.tokenizer import read_encoder

    try:
        encoder = read_encoder(folder)
    except ConfigError as error:
        logger.warning("no grammars: %s", error)
        return None
    pieces = TokenTexts(encoder).pieces
    if pieces is None:
        logger.warning("grammars are disabled: the bytes of some tokens depend on the tokens before them")
        return None
    return TokenBytes.of(token_pieces(encoder, pieces), vocab_size)
