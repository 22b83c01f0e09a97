-- Cancel a turn, at once or by its worker; see the function.
select s.is_own, (s.turn).* from towline_cancel_turn(%(turn)s::uuid, %(call)s::uuid, %(code)s::text, %(message)s::text,
  %(task)s::jsonb) s
