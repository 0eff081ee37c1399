"""Counts of kernels and copies, in small programs counted by hand and in a program of XLA."""

import jax
import jax.numpy as jnp

from stepprune_jax.efficiency.kernels import count_kernels
from tools.aot.hlo import Loop, backends, copied_weights, loops

PROGRAM = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %twice = f32[4]{0} add(%p, %p)
}

%small (p.1: f32[4]) -> f32[4] {
  %p.1 = f32[4]{0} parameter(0)
  ROOT %copy.1 = f32[4]{0} copy(%p.1)
}

%large (p.2: f32[4]) -> f32[4] {
  %p.2 = f32[4]{0} parameter(0)
  %copy.2 = f32[4]{0} copy(%p.2)
  ROOT %copy.3 = f32[4]{0} copy(%copy.2)
}

%commands (p.3: f32[4]) -> f32[4] {
  %p.3 = f32[4]{0} parameter(0)
  ROOT %fusion.1 = f32[4]{0} fusion(%p.3), kind=kLoop, calls=%fused
}

%inner_body (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %fusion.2 = (f32[4]{0}, /*index=1*/s32[]) fusion(%x), kind=kLoop, calls=%fused
  ROOT %y = f32[4]{0} get-tuple-element(%fusion.2), index=0
}

%inner_condition (x.1: f32[4]) -> pred[] {
  %x.1 = f32[4]{0} parameter(0)
  ROOT %compare = pred[] fusion(%x.1), kind=kLoop, calls=%fused
}

%outer_body (z: f32[4]) -> f32[4] {
  %z = f32[4]{0} parameter(0)
  %k = s32[] constant(0)
  %w = f32[4]{0} call(%z), to_apply=%commands
  %product = (f32[4]{0}, s8[8]{0}) custom-call(%w, %w), custom_call_target="__cublas$gemm"
  %v = f32[4]{0} get-tuple-element(%product), index=0
  %begin = ((f32[4]{0}), f32[4]{0}) all-reduce-start(%v), to_apply=%fused
  %end = f32[4]{0} all-reduce-done(%begin)
  %chosen = f32[4]{0} conditional(%k, %end, %end), branch_computations={%small, %large}
  ROOT %in = f32[4]{0} while(%chosen), condition=%inner_condition, body=%inner_body, \
metadata={op_name="jit(f)/while/body/while"}
}

%outer_condition (z.1: f32[4]) -> pred[] {
  %z.1 = f32[4]{0} parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (p.4: f32[4]) -> f32[4] {
  %p.4 = f32[4]{0} parameter(0)
  ROOT %out = f32[4]{0} while(%p.4), condition=%outer_condition, body=%outer_body, \
metadata={op_name="jit(f)/while"}
}
"""


def test_kernels_of_loops_match_a_worked_example():
    # The outer loop has the fusion of the call, the product, the sum over devices, and two copies
    # of the longer branch. The inner loop has a fusion, and another fusion in its condition.
    assert loops(PROGRAM) == (Loop("jit(f)/while", 5), Loop("jit(f)/while/body/while", 2))


def test_branches_of_a_predicate_are_read():
    old = "branch_computations={%small, %large}"
    for branch, kernels in (("large", 5), ("small", 4)):
        new = f"true_computation=%{branch}, false_computation=%small"
        assert loops(PROGRAM.replace(old, new))[0].kernels == kernels


def test_a_compiled_program_is_read():
    def f(x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: jnp.sort(x) * 2, x)

    text = jax.jit(f).lower(jnp.ones(4)).compile().as_text()
    (loop,) = loops(text)
    assert loop.name == "jit(f)/while" and loop.kernels >= 2  # A sort and a product.
    assert loops(jax.jit(jnp.sin).lower(1.0).compile().as_text()) == ()


COPIES = """HloModule jit_f, is_scheduled=true, entry_computation_layout={()->f32[4]{0}}

%inside (p: bf16[2,6,10]) -> bf16[6,10] {
  %p = bf16[2,6,10]{2,1,0} parameter(0)
  %slice = bf16[1,6,10]{2,1,0} slice(%p), slice={[1:2], [0:6], [0:10]}
  ROOT %bitcast = bf16[6,10]{1,0} bitcast(%slice)
}

ENTRY %main (w: bf16[2,6,10], x: bf16[4,6]) -> f32[4,10] {
  %w = bf16[2,6,10]{2,1,0} parameter(0)
  %x = bf16[4,6]{1,0} parameter(1)
  %sliced = bf16[6,10]{1,0} fusion(%w), kind=kLoop, calls=%inside
  %wide = f32[10,6]{0,1} convert(%sliced)
  %joined = bf16[6,30]{1,0} concatenate(%sliced, %sliced, %sliced), dimensions={1}
  %near = bf16[6,10]{1,0:T(8,128)S(1)} copy(%sliced)
  %start = (bf16[6,10]{1,0}, bf16[6,10]{1,0}, u32[]) copy-start(%sliced)
  %view = bf16[6,10]{1,0} bitcast(%sliced)
  ROOT %product = (f32[4,10]{1,0}, s8[64]{0}) custom-call(%x, %joined), custom_call_target="dot"
}
"""


def test_copied_weights_match_a_worked_example():
    """Slices, conversions and concatenations count. Views, fetches and fused slices do not."""
    assert copied_weights(COPIES, [(6, 10)]) == ("bf16[6,10]", "f32[10,6]", "bf16[6,30]")
    assert copied_weights(COPIES, [(10, 6)]) == copied_weights(COPIES, [(6, 10)])
    assert copied_weights(COPIES, [(6, 11)]) == ()


def test_products_are_counted_by_their_library():
    triton = 'backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}'
    lines = [f"  %f.{n} = f32[4]{{0}} fusion(%p), kind=kCustom, calls=%g, {triton}" for n in (1, 2)]
    counts = backends("\n".join([PROGRAM, *lines]))
    assert counts == {"__cublas$gemm": 1, "__triton_nested_gemm_fusion": 2}


KNOWN = 'backend_config={"known_trip_count":{"n":"3"}}'
LOOPED = f"""HloModule m, is_scheduled=true

%fused (p: f32[8]) -> f32[8] {{
  ROOT %add = f32[8]{{0}} add(f32[8]{{0}} %p, f32[8]{{0}} %p)
}}

%inner (t: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %a = f32[8]{{0}} fusion(f32[8]{{0}} %x), kind=kLoop, calls=%fused
  ROOT %r = (s32[], f32[8]{{0}}) tuple(s32[] %i, f32[8]{{0}} %a)
}}

%go (t: (s32[], f32[8])) -> pred[] {{
  ROOT %c = pred[] fusion(s32[] %i), kind=kLoop, calls=%fused
}}

%outer (t: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %b = f32[8]{{0}} fusion(f32[8]{{0}} %x), kind=kLoop, calls=%fused
  ROOT %w = (s32[], f32[8]{{0}}) while(%t), condition=%go, body=%inner, {KNOWN}
}}

ENTRY %main (p: f32[8]) -> f32[8] {{
  %e = f32[8]{{0}} fusion(f32[8]{{0}} %p), kind=kLoop, calls=%fused
  %w = (s32[], f32[8]{{0}}) while((s32[], f32[8]{{0}}) %t), condition=%go, body=%outer
  ROOT %g = f32[8]{{0}} get-tuple-element((s32[], f32[8]{{0}}) %w), index=1
}}
"""


def test_kernels_of_loops_are_multiplied_by_their_iterations():
    # The inner loop has two kernels and three iterations. The outer loop has two more kernels.
    assert [count_kernels(LOOPED, trips) for trips in (1, 4)] == [1 + 8, 1 + 4 * 8]
    assert count_kernels("HloModule") == 0
