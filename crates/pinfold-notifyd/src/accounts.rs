//! How much each user has.
//!
//! An account exists while its user has something, so there are never more accounts than clients.
//!
//! What a client has it has until its connection is closed, which may have to wait (`parting`). A connection that was
//! turned away because its user has too much counts in no account; those that cannot be closed yet take the descriptors
//! that no account needs, and no more of them: then no connection is accepted.

use crate::limits::ClientLimits;
use pinfold_ebpf::protocol::ViewRefusal;
use std::collections::HashMap;

const ROOT: u32 = 0;

/// What one user, or all, have.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Account {
    waiting: usize,
    views: usize,
}

/// What a connection takes until it is closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Share {
    /// It waits for its answer.
    Waiting,
    /// It has a view.
    View,
    /// It was turned away at once.
    Spare,
}

/// What all users have.
#[derive(Debug)]
pub(crate) struct Accounts {
    limits: ClientLimits,
    /// As many connections as may be open and count in no account.
    most_spare: usize,
    spare: usize,
    users: HashMap<u32, Account>,
    /// All but root.
    all: Account,
}

impl Accounts {
    pub(crate) fn new(limits: ClientLimits, most_spare: usize) -> Self {
        Self { limits, most_spare, spare: 0, users: HashMap::new(), all: Account::default() }
    }

    /// A connection of this user begins to wait for its answer.
    pub(crate) fn arrive(&mut self, user: u32) -> Result<(), ViewRefusal> {
        let (of_user, of_all) = (self.limits.waiting_per_user, self.limits.waiting);
        if user == ROOT {
            below(self.of(user).waiting, of_all, |limit| ViewRefusal::Busy { limit })?;
        } else {
            below(self.of(user).waiting, of_user, |limit| ViewRefusal::Busy { limit })?;
            below(self.all.waiting, of_all, |limit| ViewRefusal::Busy { limit })?;
        }
        self.each(user, |account| account.waiting += 1);
        Ok(())
    }

    /// A connection of this user has its answer, or has gone.
    pub(crate) fn depart(&mut self, user: u32) {
        self.each(user, |account| account.waiting = account.waiting.saturating_sub(1));
    }

    /// A view is about to be given to this user.
    pub(crate) fn grant(&mut self, user: u32) -> Result<(), ViewRefusal> {
        let (of_user, of_all) = (self.limits.views_per_user, self.limits.views);
        if user == ROOT {
            below(self.of(user).views, of_all, |limit| ViewRefusal::UserFull { limit })?;
        } else {
            below(self.of(user).views, of_user, |limit| ViewRefusal::UserFull { limit })?;
            below(self.all.views, of_all, |limit| ViewRefusal::Full { limit })?;
        }
        self.each(user, |account| account.views += 1);
        Ok(())
    }

    /// A view of this user's is no more.
    pub(crate) fn take_back(&mut self, user: u32) {
        self.each(user, |account| account.views = account.views.saturating_sub(1));
    }

    /// A connection is turned away at once.
    pub(crate) fn turn_away(&mut self) {
        self.spare += 1;
    }

    /// Whether one more connection may be open that counts in no account.
    pub(crate) fn may_turn_away(&self) -> bool {
        self.spare < self.most_spare
    }

    /// A connection of this user, which had `share`, is closed.
    pub(crate) fn release(&mut self, user: u32, share: Share) {
        match share {
            Share::Waiting => self.depart(user),
            Share::View => self.take_back(user),
            Share::Spare => self.spare = self.spare.saturating_sub(1),
        }
    }

    fn of(&self, user: u32) -> Account {
        self.users.get(&user).copied().unwrap_or_default()
    }

    /// Changes the user's account and, unless it is root's, that of all users.
    fn each(&mut self, user: u32, change: impl Fn(&mut Account)) {
        let account = self.users.entry(user).or_default();
        change(account);
        if *account == Account::default() {
            self.users.remove(&user);
        }
        if user != ROOT {
            change(&mut self.all);
        }
    }
}

fn below(
    count: usize,
    limit: usize,
    refusal: impl Fn(u64) -> ViewRefusal,
) -> Result<(), ViewRefusal> {
    if count < limit { Ok(()) } else { Err(refusal(limit as u64)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accounts() -> Accounts {
        let limits = ClientLimits {
            views: 5,
            views_per_user: 3,
            waiting: 4,
            waiting_per_user: 2,
            ..ClientLimits::default()
        };
        Accounts::new(limits, 2)
    }

    #[test]
    fn one_user_cannot_have_everything_nor_can_all_have_more() {
        let mut accounts = accounts();
        for _ in 0..3 {
            accounts.grant(1).unwrap();
        }
        assert_eq!(accounts.grant(1), Err(ViewRefusal::UserFull { limit: 3 }));
        accounts.grant(2).unwrap();
        accounts.grant(3).unwrap();
        assert_eq!(accounts.grant(4), Err(ViewRefusal::Full { limit: 5 }));
        accounts.take_back(1);
        accounts.grant(4).unwrap();
    }

    #[test]
    fn root_is_counted_apart() {
        let mut accounts = accounts();
        for _ in 0..5 {
            accounts.grant(0).unwrap();
        }
        assert_eq!(accounts.grant(0), Err(ViewRefusal::UserFull { limit: 5 }));
        for user in [1, 1, 1, 2, 2] {
            accounts.grant(user).unwrap();
        }
        assert!(accounts.grant(2).is_err());
    }

    #[test]
    fn a_share_is_had_until_it_is_released() {
        let mut accounts = accounts();
        accounts.arrive(1).unwrap();
        accounts.grant(1).unwrap();
        accounts.turn_away();
        assert!(accounts.may_turn_away());
        accounts.turn_away();
        assert!(!accounts.may_turn_away());
        for share in [Share::Waiting, Share::View, Share::Spare] {
            accounts.release(1, share);
        }
        assert!(accounts.may_turn_away() && accounts.users.is_empty());
    }

    #[test]
    fn clients_that_wait_are_counted_and_accounts_go_with_their_users() {
        let mut accounts = accounts();
        for user in [1, 1, 2, 2] {
            accounts.arrive(user).unwrap();
        }
        assert_eq!(accounts.arrive(1), Err(ViewRefusal::Busy { limit: 2 }));
        assert_eq!(accounts.arrive(3), Err(ViewRefusal::Busy { limit: 4 }));
        accounts.arrive(0).unwrap();
        for user in [1, 1, 2, 2, 0] {
            accounts.depart(user);
        }
        assert!(accounts.users.is_empty() && accounts.all == Account::default());
    }
}
