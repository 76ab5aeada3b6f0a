"""The bytes that tokens stand for in grammars."""

from collections.abc import Sequence

from tokenizers import Tokenizer as Encoder

from blinkpy.dpu.grammar.compile_grammar import TOKEN_BYTE, token_bytes


def token_pieces(encoder: Encoder, pieces: Sequence[bytes]) -> list[bytes]:
    """Of each token. pieces: what they stand for in a text. Special ones have those of compile_grammar.token_bytes; others with
    the byte that these begin with, which no text has, have none."""
    added = encoder.get_added_tokens_decoder().items()
    special = {token: token_bytes(one.content) for token, one in added if one.special and one.content}
    plain = [b"" if TOKEN_BYTE in piece else piece for piece in pieces]
    return [special.get(token, piece) for token, piece in enumerate(plain)]
