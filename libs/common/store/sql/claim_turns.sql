-- Claim turns; see the function.
select * from towline_claim_turns(%(worker)s::text, %(claim_s)s::integer, %(places)s::integer, %(held)s::uuid[])
