"""Small chat templates in the conventions of model families, written for tests: tools, calls, results and reasoning."""

CHAT_ML = (
    "{% if tools %}<|start|>system\nTools:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Answer with <tool_call>{...}</tool_call>.<|end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|start|>user\n<tool_response>{{ m.content }}</tool_response><|end|>\n"
    "{% else %}<|start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
)
HERMES = CHAT_ML.replace("<think>", "").replace("</think>", "") + "{% endif %}"
THINKING = CHAT_ML + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"
THINKING_BY_ITSELF = CHAT_ML + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
LLAMA3 = (
    '{% if tools %}<|start|>system\nAnswer with {"name": function name, "parameters": dictionary}.\n'
    "{% for tool in tools %}{{ tool | tojson(indent=4) }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<|start|>{{ 'ipython' if m.role == 'tool' else m.role }}\n"
    "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}{% endfor %}<|start|>assistant\n"
)
MISTRAL = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}]"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
MISTRAL_V11 = MISTRAL.replace(
    "[TOOL_CALLS][{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}]",
    "{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}",
)
PHI4_MINI = (
    "{% for m in messages %}<|start|>{{ m.role }}"
    "{% if tools and loop.first %}<|tool|>{{ tools | tojson }}<|/tool|>{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}<|tool_call|>{{ m.tool_calls | tojson }}<|/tool_call|>{% endif %}{% endfor %}<|start|>assistant"
)
PYTHONIC = (
    "{% if tools %}Answer with [func_name1(params_name1=params_value1)].\n{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}[{{ call.function.name }}("
    "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value | tojson }}{% endfor %})]"
    "{% endfor %}{% endfor %}<|start|>assistant\n"
)
CODER = "{% if tools %}{{ tools | tojson }}<tool_call><function=NAME></function></tool_call>{% endif %}{{ messages[0].content }}"
UNKNOWN = "{% if tools %}{{ tools | tojson }}<call name=NAME/>{% endif %}{{ messages[0].content }}"  # the sign of no known format
# As gpt-oss's: only the first message has instructions, reasoning is `thinking`, and a message has one call.
HARMONY = (
    "{%- macro said(head, text) %}<|start|>{{ head }}<|message|>{{ text }}<|end|>{% endmacro -%}"
    "{{ said('system', 'Reasoning: ' + (reasoning_effort or 'medium')) }}"
    "{%- set rest = messages[1:] if messages[0].role in ('system', 'developer') else messages %}"
    "{%- set told = messages[0].content if messages[0].role in ('system', 'developer') else '' %}"
    "{%- set named = namespace(tools='', last=none) %}"
    "{%- for tool in tools or [] %}{% set named.tools = named.tools + '// ' + tool.function.description"
    " + '\ntype ' + tool.function.name + ' = (_: ' + (tool.function.parameters | tojson) + ') => any;\n' %}{% endfor %}"
    "{%- if told or tools %}{{ said('developer', '# Instructions\n' + told + '\n# Tools\n' + named.tools) }}{% endif %}"
    "{%- for m in rest %}{% if m.role == 'user' %}{{ said('user', m.content) }}"
    "{%- elif m.role == 'tool' %}{% if not named.last %}{{ raise_exception('no call before a result') }}{% endif %}"
    "{{ said('functions.' + named.last + ' to=assistant<|channel|>commentary', m.content | tojson) }}"
    "{%- elif m.role == 'assistant' and m.tool_calls %}{% set f = m.tool_calls[0].function %}{% set named.last = f.name %}"
    "{% if m.content and m.thinking %}{{ raise_exception('either thinking or content') }}{% endif %}"
    "{% if m.content or m.thinking %}{{ said('assistant<|channel|>analysis', m.content or m.thinking) }}{% endif %}"
    "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>"
    "{%- elif m.role == 'assistant' %}{{ said('assistant<|channel|>final', m.content) }}{% endif %}{% endfor -%}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
FORMATS = {
    "hermes": HERMES,
    "llama3_json": LLAMA3,
    "mistral": MISTRAL,
    "mistral_v11": MISTRAL_V11,
    "phi4_mini": PHI4_MINI,
    "phi4_mini_json": PHI4_MINI.replace("<|tool_call|>", "functools").replace("<|/tool_call|>", ""),
    "pythonic": PYTHONIC,
}
"""A template of each call format."""

# Templates that raise errors, as published templates do, each with its parser.
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "<|start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>model\n{% endif %}"
)
GEMMA3 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set told = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}"
    "{% else %}{% set told = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<|start|>{{ m.role }}\n{{ told if loop.first else '' }}{{ m.content | trim }}<|end|>\n{% endfor %}"
)
MISTRAL_STRICT = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set told = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}"
    "{% else %}{% set told = '' %}{% set rest = messages %}{% endif %}{% set ns = namespace(index=0) %}"
    "{% for m in rest %}{% if not (m.role == 'tool' or m.tool_calls) %}{% if (m.role == 'user') != (ns.index % 2 == 0) %}"
    "{{ raise_exception('After the optional system message, conversation roles must alternate user/assistant') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}[INST]{{ told if loop.first else '' }}{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for call in m.tool_calls %}"
    "{% if call.id is undefined or call.id | length != 9 %}{{ raise_exception('Tool call IDs must have length 9') }}{% endif %}"
    "{{ call.function | tojson }}{{ call.id }}{% endfor %}]{% elif m.role == 'assistant' %}{{ m.content }}</s>"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id is undefined or m.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs must have length 9') }}{% endif %}[TOOL_RESULTS]{{ m.content }}{{ m.tool_call_id }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}{% endfor %}"
)
LLAMA_STRICT = (
    "{% if messages[0].role == 'system' %}{% set told = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set told = '' %}{% set rest = messages %}{% endif %}<|start|>system\n{{ told }}"
    "{% for t in tools or [] %}{{ t | tojson(indent=4) }}{% endfor %}{% for m in rest %}"
    "{% if m.role in ('system', 'developer') %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls') }}"
    '{% endif %}<|start|>assistant\n{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ "{" }}'
    '{% for key, value in m.tool_calls[0].function.arguments.items() %}"{{ key }}": {{ value | tojson }}{% endfor %}}}'
    "{% else %}<|start|>{{ 'ipython' if m.role == 'tool' else m.role }}\n{{ m.content }}{% endif %}{% endfor %}"
    "<|start|>assistant\n"
)
QWEN_STRICT = CHAT_ML.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.role in ('system', 'developer') and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}",
    1,
) + "{% endif %}"  # fmt: skip
DEEPSEEK = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
    '<tool_call>{"name": "{{ c.function.name }}", '
    "\"arguments\": {{ '' + c.function.arguments }}}</tool_call>{% endfor %}{% else %}{{ m.content + '' }}{% endif %}{% endfor %}"
)
NO_TOOLS = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}<|start|>assistant\n"
RAISING = {
    "gemma": (GEMMA, "hermes"),
    "gemma3": (GEMMA3, "hermes"),
    "mistral_strict": (MISTRAL_STRICT, "mistral"),
    "llama_strict": (LLAMA_STRICT, "llama3_json"),
    "qwen_strict": (QWEN_STRICT, "hermes"),
    "deepseek": (DEEPSEEK, "hermes"),
    "no_tools": (NO_TOOLS, "hermes"),
}
WITHOUT_TOOLS = ("gemma", "gemma3", "no_tools")
"""Templates of RAISING without tools."""
