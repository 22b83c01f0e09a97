-- Cancel a turn, at once or by its worker; see the function.
select * from towline_cancel_turn(%(turn)s::uuid, %(code)s::text, %(message)s::text, %(task)s::jsonb)
