"""From a structure to a grammar, by xgrammar: next door to try it, then in the worker."""

import xgrammar

from engine.messages import WHITESPACE_MAX, Structure
from engine.tokenization import Tokenizer


def tokenizer_info(tokenizer: Tokenizer) -> xgrammar.TokenizerInfo:
    """The vocabulary as the grammar engine needs it.

    Control tokens spell what no text contains (0xFF begins no character), so that they are never
    taken for text, and yet can be named: the engine refuses a token that spells nothing.
    """
    vocabulary = [
        b"\xff%d" % token_id
        if token_id in tokenizer.special_token_ids
        else tokenizer.token_text(token_id)
        for token_id in range(tokenizer.vocab_size)
    ]
    return xgrammar.TokenizerInfo(
        vocabulary,
        vocab_type=xgrammar.VocabType.RAW,
        vocab_size=len(vocabulary),
        stop_token_ids=list(tokenizer.eos_token_ids),
    )


def create_compiler(tokenizer: Tokenizer) -> xgrammar.GrammarCompiler:
    """A compiler for one vocabulary that leaves remembering to others."""
    return xgrammar.GrammarCompiler(tokenizer_info(tokenizer), max_threads=1, cache_enabled=False)


def compile_structure(
    compiler: xgrammar.GrammarCompiler, structure: Structure
) -> xgrammar.CompiledGrammar:
    """The grammar of `structure`. Raises RuntimeError with the compiler's own words."""
    if structure.kind == "regex":
        return compiler.compile_regex(structure.source)
    if structure.kind == "ebnf":
        return compiler.compile_grammar(structure.source)
    if structure.kind == "structural_tag":
        return compiler.compile_structural_tag(structure.source)
    return compiler.compile_json_schema(structure.source, max_whitespace_cnt=WHITESPACE_MAX)
