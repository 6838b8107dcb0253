"""Scripted engine for tests: a worker in a real process, without MLX, controlled by directions in the prompt.

It implements the same contract as the real engine, so service, loop, scheduler and wire are the real ones.
Tests of the gateway and of faults run it: `python -m tests.scripted_worker --endpoint … [--step-ms N]`.

A prompt's tokens are the words of its text, and a few for each image or video. The output begins with a word
for each image or video: type, digest and pixel limit (`png:1a2b3c4d`, `jpeg:5e6f7a8b/262144`). The token at a
position is a pure function of seed and position, as with the real engine. Words that begin with `!` are
directions:

    !tokens=N   generate N tokens (default 32)          !slow=MS   steps with this row take MS milliseconds
    !die=N      the process is killed at token N        !hang=N    the model thread blocks forever at token N
    !fail=N     the step fails at token N               !oom       the prefill runs out of memory
    !burst      the process is killed in the prefill    (of a prompt with two words or more)
    !bad        the request cannot be prepared          !text=S    the text of every token is S
    !prefill=MS chunks of this prompt take MS           !think=N   the first N tokens are reasoning
    !look=MS    encoding each of its images takes MS    !blind     its images cannot be encoded
    !clock      the text of every token is the machine's monotonic time in nanoseconds
    !call=N     after two words, the output calls the tool `note` N times, with some words each
"""
