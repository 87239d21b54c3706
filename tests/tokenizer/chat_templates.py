"""Chat templates in the styles of the models that this project loads, some of them from TRL."""

from tests.data.stock_templates import read_template

CHATML = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\\nYou are a helpful AI assistant<|im_end|>\\n' }}{% endif %}\
{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

MISTRAL = """\
{{ bos_token }}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}\
{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}\
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}\
{% endfor %}"""

GENERATION = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {{- message.content + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

COMMAND_R = """\
{{ bos_token }}{% set ns = namespace(seen=0) %}
{% for document in documents or [] %}
  {%- if loop.index > 2 %}{% break %}{% endif %}
Document {{ loop.index0 }}: {{ document['title'] }}
{{ document | tojson(indent=2, sort_keys=true) }}
{% endfor %}
{% for message in messages %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
    {% set ns.seen = ns.seen + 1 %}
{{ ns.seen }} {{ message.role }}: {{ message.content }} {{ dict(a=1)['a'] }}
{% endfor %}
{{ custom | default('no custom') }}{% if add_generation_prompt %}{{ unk_token }}{% endif %}
"""

REPLACE = "{% for m in messages %}{{ m.content | replace('e', '3') }}{% endfor %}"

LLAMA3, GEMMA, QWEN3 = map(read_template, ("llama3_1", "gemma", "qwen3"))
TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "qwen3": QWEN3,
    "generation": GENERATION,
    "command-r": COMMAND_R,
    "replace": REPLACE,
}
