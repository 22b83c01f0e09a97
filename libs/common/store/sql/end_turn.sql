-- End a turn (rules 1, 31); see the function.
select f.is_own, (f.turn).* from towline_end_turn(%(turn)s::uuid, %(run)s::uuid, %(call)s::uuid, %(state)s::text,
  %(text)s::text, %(code)s::text, %(message)s::text, %(usage)s::jsonb, %(task)s::jsonb) f
