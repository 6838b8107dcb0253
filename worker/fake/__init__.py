"""The scripted engine: a worker in its own real process, without MLX, that does what the prompt says.

It stands beside the real engine behind the same contract, so service, loop, scheduler and wire are the real
ones. Tests of the gateway and of faults run on it: `python -m worker.fake --endpoint … [--step-ms N]`.

A prompt's tokens are the words of its text, and a few for each image or video; the answer begins with a
word for each: what it is, its bytes' digest and how large it may be (`png:1a2b3c4d`, `jpeg:5e6f7a8b/262144`).
The answer's token at a position is a pure function of seed and position, as the real engine promises. Words
that begin with `!` are directions:

    !tokens=N   answer with N tokens (else 32)         !slow=MS    a step with this row aboard takes so long
    !die=N      the process is killed at token N        !hang=N    the model thread blocks for good at token N
    !fail=N     the step fails at token N               !oom       the prefill runs out of memory
    !burst      the process is killed in the prefill    (of a prompt with two words or more)
    !bad        the request can't be prepared           !text=S    the answer's every token reads S
    !prefill=MS a chunk of this prompt takes so long   !think=N    the first N tokens are thoughts
    !look=MS    each image of it takes so long          !blind      none of its images can be encoded
    !clock      every token reads when it was said, in nanoseconds of the machine's monotonic clock
    !call=N     behind two words the answer calls the tool `note` N times, with some words each
"""
