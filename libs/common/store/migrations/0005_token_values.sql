-- Every value of a machine token that may still be good (see tokens.py). Whoever writes `machine_tokens.hash` has it kept
-- here by the trigger: the release before this one, too, which goes on to read `hash` and `previous_hash`.

create table machine_token_values (
  hash bytea primary key,
  token_id uuid not null references machine_tokens on delete cascade,
  expires_at timestamptz,              -- of this value; null: never. Revocation and the token's own end count as well
  used_at timestamptz                  -- when it first opened a session: the machine has it, or had it
);
create index machine_token_values_of_token on machine_token_values (token_id);

create function towline_keep_token_value() returns trigger language plpgsql as $$
begin
  insert into machine_token_values (hash, token_id, expires_at) values (new.hash, new.token_id, new.expires_at)
  on conflict (hash) do nothing;
  return null;
end
$$;
create trigger towline_keep_value after insert or update of hash on machine_tokens
for each row execute function towline_keep_token_value();

insert into machine_token_values (hash, token_id, expires_at)
select hash, token_id, expires_at from machine_tokens
union all
select previous_hash, token_id, previous_expires_at from machine_tokens where previous_expires_at > now();
