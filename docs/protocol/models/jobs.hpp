// The steps of the job path: gateways, machines, sessions, sweeper, deadline and faults. jobs_state.hpp has the scope,
// the state, the rules that can be taken away, and what is claimed.
#pragma once

#include "jobs_state.hpp"

struct Jobs : JobsState {
  void next(const State& s, Steps<State>& out) const {
    for (int g = 0; g < GATEWAYS; g++) submit(s, g, out);
    if (s.result) out.step(SLOW, "result key expires", [](State& n) { n.result = 0; });
    for (int m = 1; m <= o.machines; m++) run_machine(s, m, out);
    for (int i = 1; i <= s.sessions; i++) run_session(s, i, out);
    if (o.sweeper) sweep(s, out);
    pass_deadline(s, out);
    break_stores_and_workers(s, out);
  }

  void submit(const State& s, int g, Steps<State>& out) const {
    const uint8_t at = s.gateway[g];
    auto answer = [&](State& n, uint8_t outcome) {
      n.gateway[g] = ANSWERED;
      n.told[g] = outcome;
    };
    if (at == IDLE && s.postgres_up) {
      if (s.record == NO_RECORD)
        out.step(PROMPT, "gateway %d: record committed", g + 1, [&](State& n) {
          n.record = QUEUED;
          n.gateway[g] = INSERTED;
        });
      else if (s.record == TERMINAL)
        out.step(PROMPT, "gateway %d: key known, replays the record", g + 1, [&](State& n) { answer(n, s.outcome); });
      else
        out.step(PROMPT, "gateway %d: key known, joins", g + 1, [&](State& n) { n.gateway[g] = JOINED; });
    }
    if (at == INSERTED || at == JOINED)
      out.step(PROMPT,
               at == INSERTED ? "gateway %d: enqueue script (waiter, entry)" : "gateway %d: registers as waiting",
               g + 1, [&](State& n) {
                 if (s.result) {
                   answer(n, s.result);
                   return;
                 }
                 n.waiters |= 1 << g;
                 if (at == INSERTED) enqueue(n);
                 n.gateway[g] = o.reads_record_after_registering ? REGISTERED : WAITING;
               });
    if (at == REGISTERED && s.postgres_up)
      out.step(PROMPT, "gateway %d: reads the record after registering", g + 1, [&](State& n) {
        if (s.record == TERMINAL)
          answer(n, s.outcome);
        else
          n.gateway[g] = WAITING;
      });
    if ((at == WAITING || at == REGISTERED) && s.reply[g])
      out.step(PROMPT, "gateway %d: told outcome %d", g + 1, s.reply[g], [&](State& n) { answer(n, s.reply[g]); });
    if (at == WAITING && o.rereads_records && s.record == TERMINAL && s.postgres_up)
      out.step(PROMPT, "gateway %d: reads its waiters' records again", g + 1, [&](State& n) { answer(n, s.outcome); });
    if ((at == INSERTED || at == WAITING || at == JOINED) && may(s, &State::gateway_kills))
      out.step(FAULT, "gateway %d DIES", g + 1, [&](State& n) {
        use(n, &State::gateway_kills);
        n.gateway[g] = DEAD;
      });
  }

  void run_machine(const State& s, int m, Steps<State>& out) const {
    bool live = false;  // also another machine's: this one stands by
    for (int i = 1; i <= s.sessions; i++) live |= s.session[i].phase == LIVE;
    if (s.up[m] && !live && s.sessions < SESSIONS_MAX)
      for (int w = 1; w <= 2; w++)
        if (s.worker[w] == UP)
          out.step(PROMPT, "machine %d connects to worker %d (new epoch)", m, w, [&](State& n) {
            Session& c = n.session[++n.sessions];
            c.phase = LIVE;
            c.worker = w;
            c.machine = m;
            n.stored = n.sessions;
          });
    if (s.up[m] && s.running[m])
      out.step(PROMPT, "machine %d: tool done, journalled", m, [&](State& n) {
        n.row[m] = ROW_COMPLETED;
        n.running[m] = 0;
        for (int i = 1; i <= s.sessions; i++)
          if ((s.joined[m] >> i & 1) && s.session[i].phase == LIVE) n.session[i].result = COMPLETED;
        n.joined[m] = 0;
      });
    if (s.up[m] && may(s, &State::kills))
      out.step(FAULT, "machine %d: sidecar KILLED", m, [&](State& n) {
        use(n, &State::kills);
        n.up[m] = n.running[m] = 0;
        for (int i = 1; i <= s.sessions; i++) {
          if (s.session[i].machine != m || s.session[i].phase != LIVE) continue;
          lose_socket(n, i);
          n.session[i].phase = HALF_OPEN;
        }
        n.joined[m] = 0;
      });
    if (!s.up[m])
      out.step(o.machine_returns ? PROMPT : FAULT, "machine %d: sidecar starts again", m,
               [&](State& n) { n.up[m] = 1; });
    if (s.row[m] && !s.running[m] && may(s, &State::losses))
      out.step(FAULT, "machine %d: journal forgets (retention, reinstall, restore)", m, [&](State& n) {
        use(n, &State::losses);
        n.row[m] = NO_ROW;
        n.forgot[m] = 1;
      });
  }

  void run_session(const State& s, int i, Steps<State>& out) const {
    const Session& c = s.session[i];
    const bool worker_up = s.worker[c.worker] == UP;
    const bool worker_frozen = s.worker[c.worker] == FROZEN;
    if (c.phase == LIVE && (may(s, &State::drops) || worker_frozen))
      out.step(worker_frozen ? PROMPT : FAULT, "socket of session %d drops (worker not aware yet)", i, [&](State& n) {
        lose_socket(n, i);
        n.session[i].phase = HALF_OPEN;
        if (!worker_frozen) use(n, &State::drops);
      });
    if (c.phase == HALF_OPEN && worker_up)
      out.step(PROMPT, "worker %d notices that session %d is gone", c.worker, i, [&](State& n) {
        n.session[i].phase = CLOSED;
        if (!c.unwritten && !c.to_settle) forget(n.session[i]);
      });
    if (s.worker[c.worker] == DOWN) return;
    read(s, i, out);
    if (worker_up && c.phase != CLOSED)
      for (int e = 0; e < ENTRIES; e++)
        if ((c.held >> e & 1) && !(c.sent >> e & 1) && !c.unwritten && !c.to_settle) deliver(s, i, e, out);
    if (c.phase == LIVE && s.up[c.machine]) talk(s, i, worker_up, out);
    if (!worker_up) return;
    if (c.unwritten && s.postgres_up)
      out.step(PROMPT, "session %d: outcome %d to Postgres", i, c.unwritten, [&](State& n) {
        end_record(n, c.unwritten);
        n.session[i].to_settle = o.record_published ? n.outcome : c.unwritten;
        n.session[i].unwritten = 0;
      });
    if (c.to_settle) {
      const bool passes = !o.finish_fenced || s.stored <= i;
      out.step(PROMPT, passes ? "session %d: settles (publish, ack, delete)" : "session %d: settle REFUSED (old epoch)",
               i, [&](State& n) {
                 n.session[i].to_settle = 0;
                 forget(n.session[i]);
                 if (!passes) return;
                 publish(n, c.to_settle);
                 for (int e = 0; e < ENTRIES; e++)
                   if ((c.held >> e & 1) || o.settle_by_anyone) n.entry[e] = n.owner[e] = 0;
               });
    }
  }

  void read(const State& s, int i, Steps<State>& out) const {
    const Session& c = s.session[i];
    const bool worker_up = s.worker[c.worker] == UP;
    if (c.phase == CLOSED) return;
    if (o.no_group) {
      if (worker_up && !c.to_settle)
        for (int e = 0; e < ENTRIES; e++)
          if (s.entry[e] && !(c.held >> e & 1))
            out.step(PROMPT, "session %d sees entry %d", i, e, [&](State& n) { n.session[i].held |= 1 << e; });
      return;
    }
    for (int e = 0; e < ENTRIES; e++)
      if (s.entry[e] == UNREAD && (!o.fenced_read || (worker_up && s.stored <= i)))
        out.step(
            PROMPT,
            worker_up ? "session %d reads entry %d" : "session %d: blocked read of the FROZEN worker takes entry %d", i,
            e, [&](State& n) {
              n.entry[e] = PENDING;
              n.owner[e] = i;
              n.session[i].held |= 1 << e;
              n.stored = std::max<uint8_t>(n.stored, i);
              count(n.deliveries);
              if (o.claims_when_epoch_raised && s.stored < i) n.session[i].has_claimed = 0;
            });
    if (!worker_up || s.stored > i) return;
    auto claim = [&](State& n) {
      n.stored = i;
      for (int e = 0; e < ENTRIES; e++) {
        if (s.entry[e] != PENDING || s.owner[e] == i) continue;
        n.owner[e] = i;
        n.session[i].held |= 1 << e;
        n.session[i].sent &= ~(1 << e);
        n.session[i].marked &= ~(1 << e);
      }
    };
    if (o.claims_again ? has_others(s, i) : !c.has_claimed)
      out.step(PROMPT, "session %d claims what older sessions hold", i, [&](State& n) {
        claim(n);
        n.session[i].has_claimed = 1;
        const bool runs = o.running_is_no_poison && s.up[c.machine] && s.running[c.machine];
        for (int e = 0; e < ENTRIES; e++)
          if (s.entry[e] == PENDING && s.owner[e] != i && !runs) count(n.deliveries);
      });
    if (!o.claims_again && has_others(s, i)) out.step(SLOW, "session %d: claim of what was idle for long", i, claim);
    if (s.stored < i)
      out.step(PROMPT, "session %d asserts its epoch again", i, [&](State& n) {
        n.stored = i;
        if (o.claims_when_epoch_raised) n.session[i].has_claimed = 0;
      });
  }

  void deliver(const State& s, int i, int e, Steps<State>& out) const {
    const Session& c = s.session[i];
    auto end = [&](const char* label, uint8_t outcome) {
      out.step(PROMPT, label, i, [&](State& n) {
        end_record(n, outcome);
        n.session[i].to_settle = o.record_published ? n.outcome : outcome;
      });
    };
    const uint8_t poisoned = o.poison_is_unknown && s.ever_sent ? UNKNOWN : UNDELIVERABLE;
    if (!o.begin_mark && o.limit && s.deliveries >= o.limit) {
      if (s.postgres_up) end("session %d: poison limit reached", poisoned);
      return;
    }
    if (o.begin_mark && !(c.marked >> e & 1)) {
      if (!s.postgres_up) return;
      if (s.record == TERMINAL)
        out.step(PROMPT, "session %d: begin finds a terminal record", i,
                 [&](State& n) { n.session[i].to_settle = s.outcome; });
      else if (o.limit && s.marks >= o.limit && !(o.running_is_no_poison && s.running[c.machine]))
        end("session %d: poison limit reached", poisoned);
      else if (o.pinned_to_machine && s.record == BEGUN && s.begun_on != c.machine)
        end("session %d: begun on another machine: unknown", UNKNOWN);
      else
        out.step(PROMPT, "session %d: begin mark in Postgres", i, [&](State& n) {
          n.record = BEGUN;
          n.begun_on = c.machine;
          count(n.marks);
          n.session[i].marked |= 1 << e;
        });
      return;
    }
    out.step(PROMPT, "session %d sends the job frame (entry %d)", i, e, [&](State& n) {
      n.session[i].sent |= 1 << e;
      n.ever_sent = 1;
      if (c.phase == LIVE) n.session[i].frame = 1;
    });
  }

  // The machine's side of a socket, and results arriving at the worker.
  void talk(const State& s, int i, bool worker_up, Steps<State>& out) const {
    const Session& c = s.session[i];
    const int m = c.machine;
    const uint8_t stored_outcome = s.row[m] == ROW_COMPLETED ? COMPLETED : UNKNOWN;
    auto answer = [&](const char* label, uint8_t outcome, uint8_t row) {
      out.step(PROMPT, label, m, i, [&](State& n) {
        n.session[i].frame = 0;
        n.row[m] = row;
        n.session[i].result = outcome;
      });
    };
    if (o.unasked_outcomes && !c.frame && !c.result && s.row[m] >= ROW_COMPLETED && !c.unwritten && !c.to_settle &&
        s.record != TERMINAL)
      answer("machine %d sends its stored outcome unasked on session %d", stored_outcome, s.row[m]);
    if (c.frame && o.poison)
      out.step(PROMPT, "machine %d: the frame of session %d kills the sidecar before it journals", m, i, [&](State& n) {
        n.up[m] = 0;
        lose_socket(n, i);
        n.session[i].phase = HALF_OPEN;
      });
    else if (c.frame && s.row[m] == NO_ROW && s.forgot[m] && o.horizon)
      answer("machine %d: job of session %d lies below the journal's horizon: unknown", UNKNOWN, NO_ROW);
    else if (c.frame && s.row[m] == NO_ROW)
      out.step(PROMPT, "machine %d: journals and EXECUTES (session %d)", m, i, [&](State& n) {
        n.session[i].frame = 0;
        n.row[m] = RUNNING;
        n.running[m] = 1;
        n.executions = std::min(s.executions + 1, 2);
        n.joined[m] |= 1 << i;
      });
    else if (c.frame && s.row[m] == RUNNING && s.running[m])
      out.step(PROMPT, "machine %d: redelivery of session %d joins the running action", m, i, [&](State& n) {
        n.session[i].frame = 0;
        n.joined[m] |= 1 << i;
      });
    else if (c.frame && s.row[m] == RUNNING)
      answer("machine %d: was cut off: unknown (session %d)", UNKNOWN, ROW_UNKNOWN);
    else if (c.frame)
      answer("machine %d: answers session %d from the journal", stored_outcome, s.row[m]);
    if (c.result && worker_up)
      out.step(PROMPT, "worker %d takes the result on session %d", c.worker, i, [&](State& n) {
        n.session[i].unwritten = c.result;
        n.session[i].result = 0;
      });
  }

  // It can be slow between looking and enqueueing.
  void sweep(const State& s, Steps<State>& out) const {
    if (!s.sweeping && is_open(s) && !is_queued(s) && s.postgres_up)
      out.step(PROMPT, "sweeper: sees an open record that Redis lacks", [](State& n) { n.sweeping = 1; });
    if (s.sweeping)
      out.step(PROMPT, "sweeper: enqueues it", [&](State& n) {
        n.sweeping = 0;
        enqueue(n);
      });
    if (o.settle_by_anyone && s.record == TERMINAL && is_queued(s) && s.postgres_up)
      out.step(PROMPT, "sweeper: settles a terminal record", [&](State& n) {
        publish(n, s.outcome);
        remove_all(n);
      });
  }

  void pass_deadline(const State& s, Steps<State>& out) const {
    if (!s.late && s.record != NO_RECORD) out.step(SLOW, "the deadline passes", [](State& n) { n.late = 1; });
    if (s.late && is_open(s) && s.postgres_up) {
      if (o.begin_mark)
        out.step(SLOW, "deadline: one statement", [&](State& n) {
          end_record(n, s.record == QUEUED ? EXPIRED : UNKNOWN);
          n.deadline_owes_settle = 1;
        });
      else if (!s.deadline_plan)
        out.step(SLOW, "deadline: looks at Redis", [&](State& n) {
          const bool pending = s.entry[0] == PENDING || s.entry[1] == PENDING;
          const bool unread = s.entry[0] == UNREAD || s.entry[1] == UNREAD;
          n.deadline_plan = pending ? UNKNOWN : unread || !o.withdraw_before_expiry ? EXPIRED : UNKNOWN;
          if (o.withdraw_before_expiry && n.deadline_plan == EXPIRED) remove_all(n);
        });
      else
        out.step(SLOW, "deadline: writes outcome %d", s.deadline_plan, [&](State& n) {
          end_record(n, s.deadline_plan);
          n.deadline_plan = 0;
          n.deadline_owes_settle = 1;
        });
    }
    if (s.deadline_owes_settle)
      out.step(PROMPT, "deadline: settles", [&](State& n) {
        n.deadline_owes_settle = 0;
        publish(n, s.outcome);
        remove_all(n);
      });
  }

  void break_stores_and_workers(const State& s, Steps<State>& out) const {
    for (int w = 1; w <= 2; w++) {
      if (s.worker[w] == UP && may(s, &State::worker_kills))
        out.step(FAULT, "worker %d KILLED", w, [&](State& n) {
          use(n, &State::worker_kills);
          n.worker[w] = DOWN;
          for (int i = 1; i <= s.sessions; i++) {
            if (s.session[i].worker != w) continue;
            lose_socket(n, i);
            Session& c = n.session[i];
            c.phase = CLOSED;
            c.unwritten = c.to_settle = 0;
            forget(c);
          }
        });
      if (s.worker[w] == DOWN) out.step(PROMPT, "worker %d starts again", w, [&](State& n) { n.worker[w] = UP; });
      if (s.worker[w] == UP && may(s, &State::freezes))
        out.step(FAULT, "worker %d FREEZES", w, [&](State& n) {
          use(n, &State::freezes);
          n.worker[w] = FROZEN;
        });
      if (s.worker[w] == FROZEN) out.step(PROMPT, "worker %d wakes", w, [&](State& n) { n.worker[w] = UP; });
    }
    if (may(s, &State::flushes))
      out.step(FAULT, "Redis FLUSHED", [](State& n) {
        use(n, &State::flushes);
        remove_all(n);
        memset(n.reply, 0, GATEWAYS);
        n.result = n.waiters = n.stored = n.deliveries = 0;
      });
    if (s.postgres_up && may(s, &State::outages))
      out.step(FAULT, "Postgres AWAY", [](State& n) {
        use(n, &State::outages);
        n.postgres_up = 0;
      });
    if (!s.postgres_up) out.step(PROMPT, "Postgres back", [](State& n) { n.postgres_up = 1; });
  }
};
