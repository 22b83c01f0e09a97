-- Give an attempt back; see the function.
select towline_release_turn(%(run)s::uuid) as done
