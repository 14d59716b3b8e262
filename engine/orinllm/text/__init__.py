"""Characters and tokens: vocabularies, templates, answers, tool calls, grammars."""
