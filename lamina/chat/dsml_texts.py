"""The fixed English texts of the DSML prompt encoding: model data, byte for byte what the models were trained on.

They are published with the checkpoints (`encoding_dsv4.py`); the tests check them by their hashes. Change nothing here.
"""

#: frame of the tools section. Its fields: dsml_token, thinking_start_token, thinking_end_token, tool_schemas.
TOOLS = (
    "## Tools\n"
    "\n"
    "You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "
    '"<{dsml_token}tool_calls>" block like the following:\n'
    "\n"
    "<{dsml_token}tool_calls>\n"
    '<{dsml_token}invoke name="$TOOL_NAME">\n'
    '<{dsml_token}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{dsml_token}parameter>\n'
    "...\n"
    "</{dsml_token}invoke>\n"
    '<{dsml_token}invoke name="$TOOL_NAME2">\n'
    "...\n"
    "</{dsml_token}invoke>\n"
    "</{dsml_token}tool_calls>\n"
    "\n"
    'String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, '
    'arrays, objects), pass the value in JSON format and set `string="false"`.\n'
    "\n"
    "If thinking_mode is enabled (triggered by {thinking_start_token}), you MUST output your complete reasoning "
    "inside {thinking_start_token}...{thinking_end_token} BEFORE any tool calls or final response.\n"
    "\n"
    "Otherwise, output directly after {thinking_end_token} with tool calls or final response.\n"
    "\n"
    "### Available Tool Schemas\n"
    "\n"
    "{tool_schemas}\n"
    "\n"
    "You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
)

#: the section on the answer's form. Its field: schema.
RESPONSE_FORMAT = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{schema}"

#: preamble of the stronger effort: the April encoder's "max", the later encoder's "high".
EFFORT_ABSOLUTE = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n"
    "\n"
)

#: preamble of the later encoder's "max".
EFFORT_BEYOND = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose "
    "the problem into its most fundamental components, trace every causal chain to its root, and resolve the "
    "underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain "
    "that no assumption remains unchecked and no error remains undiscovered.\n"
    "\n"
)
