-- Begin an attempt; see the function.
select b.verdict, b.is_first, b.elapsed_ms, b.entry_text, (b.turn).* from towline_begin_turn(%(turn)s::uuid, %(run)s::uuid, %(attempt)s::integer) b
