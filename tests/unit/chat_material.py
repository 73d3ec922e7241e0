"""Small tokenizers with chat templates of the forms that five model families have, each with its own habits."""

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from async_rl.models.text import TokenizerText

# ChatML, as Hermes and Qwen2.5: calls in <tool_call>, tool answers as a user's turn, adjacent ones in one turn.
QWEN = """{%- if tools %}<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' else 'You help.' }}
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# The same with reasoning, which earlier turns lose once a later user's turn is there: as Qwen3.
QWEN3 = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role in ('system', 'user') %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if loop.index0 > ns.last %}<think>
{{ m.reasoning_content or '' }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Headers and trimmed contents, a call as one bare object, as Llama 3.
LLAMA = """{{- '<|begin_of_text|>' }}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{{ m.content | tojson }}<|eot_id|>
{%- elif m.tool_calls %}<|start_header_id|>assistant<|end_header_id|>

{%- set call = m.tool_calls[0].function %}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- else %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

# No new lines, turns that must alternate, call ids of nine characters, as Mistral.
MISTRAL = """{{- '<s>' }}
{%- for m in messages %}
{%- if m.role == 'user' %}[INST] {{ m.content }}[/INST]
{%- elif m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]
{%- elif m.role == 'assistant' and m.tool_calls %}[TOOL_CALLS][
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('a call id has nine characters') }}{% endif -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}
{%- if not loop.last %}, {% endif %}
{%- endfor %}]</s>
{%- elif m.role == 'assistant' %} {{ m.content | trim }}</s>
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}
{{- '[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}"""

# Full-width marks, thought cut off from the content of what was said, as DeepSeek.
DEEPSEEK = """{{- '<｜begin▁of▁sentence｜>' }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ m.content }}
{%- elif m.role == 'user' %}<｜User｜>{{ m.content }}
{%- elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>
{%- elif m.role == 'assistant' %}<｜Assistant｜>{{ (m.content or '').split('</think>')[-1] }}
{%- for call in m.tool_calls or [] %}
{%- if loop.first %}<｜tool▁calls▁begin｜>{% endif %}<｜tool▁call▁begin｜>{{ call.function.name }}<｜tool▁sep｜>
{{- call.function.arguments | tojson }}<｜tool▁call▁end｜>
{%- if loop.last %}<｜tool▁calls▁end｜>{% endif %}
{%- endfor %}<｜end▁of▁sentence｜>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<｜Assistant｜>{% endif %}"""

FAMILIES = {
    "qwen": (QWEN, ["<|im_end|>"], ["<|im_start|>", "<tool_call>", "</tool_call>"]),
    "qwen3": (QWEN3, ["<|im_end|>"], ["<|im_start|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]),
    "llama": (
        LLAMA,
        ["<|eot_id|>", "<|eom_id|>"],
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"],
    ),
    "mistral": (MISTRAL, ["</s>"], ["<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]),
    "deepseek": (
        DEEPSEEK,
        ["<｜end▁of▁sentence｜>"],
        [
            "<｜begin▁of▁sentence｜>",
            "<｜User｜>",
            "<｜Assistant｜>",
            *(f"<｜tool▁{part}｜>" for part in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")),
            *(f"<｜tool▁output▁{part}｜>" for part in ("begin", "end")),
        ],
    ),
}
CORPUS = [
    "the sum of two numbers is a number, and the product is another one. hello, what is it?",
    '{"name": "add", "arguments": {"a": 1, "b": 22}} {"name": "look", "parameters": {"x": "yes"}}',
    "user assistant system tool ipython is was were will be 0 1 2 3 4 5 6 7 8 9 10 11 12",
] * 20


@cache
def chat_text(family):
    """A byte-level BPE with the family's special tokens, its end tokens and its template."""
    template, ends, marks = FAMILIES[family]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=[*ends, *marks], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, eos_token=ends[0])
    return TokenizerText(fast, fast.convert_tokens_to_ids(ends))
