-- End a turn (rules 1, 31); see the function.
select * from towline_end_turn(%(turn)s::uuid, %(run)s::uuid, %(state)s::text, %(entry)s::uuid, %(text)s::text,
  %(code)s::text, %(message)s::text, %(usage)s::jsonb, %(task)s::jsonb)
