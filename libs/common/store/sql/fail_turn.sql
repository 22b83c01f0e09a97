-- Have an attempt repeated after a pause; see the function.
select towline_fail_turn(%(run)s::uuid, %(reason)s::jsonb, %(after_s)s::float8) as done
